"""A program of two stages that HiGHS 1.15.1 presolves for ever; prints its optimum.

Variables 0 and 1 are seconds, 2 says that the configuration is used, 19 and 20 are time and
transient of a stage, all others are columns.
"""

from planner.solver import Minimisation

CONTINUOUS = {0, 1, 19, 20}
FIRST_S = (
    59.746765894103795, 59.746765894103795, 72.881618911959, 82.82182640696809,
    59.746765894103795, 72.88161891195901, 82.82182640696809, 109.0915324426785,
)  # fmt: skip
HELD = (
    0.4199752801939363, 0.44236793401909696, 0.2661974676382185, 0.7378622766535521,
    0.4395065301914273, 0.28572871763570956, 0.7573935266510431, 0.4931378270797254,
)  # fmt: skip
BEHIND = (0.6996733565911556, 0.6996733565911556, 0.4981310613584247, 0.4981310613584247)
FIRST, LAST = range(5, 13), range(15, 19)

EQUAL = (
    ({2: 1.0}, 1.0),
    ({3: 1.0, 4: 1.0, 2: -1.0}, 0.0),
    ({**dict.fromkeys(FIRST, 1.0), 2: -1.0}, 0.0),
    ({**dict.fromkeys(LAST, 1.0), 2: -1.0}, 0.0),
    ({**dict(zip(FIRST, FIRST_S, strict=True)), 19: -1.0}, 0.0),
    ({5: 1.0, 6: 1.0, 7: 1.0, 13: -1.0}, 0.0),
    ({13: 1.0, 14: 1.0, 15: -1.0, 16: -1.0}, 0.0),
)
AT_MOST = (
    ({19: 2.0, 0: -1.0}, 0.0),
    ({19: 2.0, 0: -1.0}, 0.0),
    ({19: 1.0, 0: -1.0}, 0.0),
    (
        {
            **{3: 0.6568234021220711, 4: 0.6792160559472318},
            **{13: 0.3198559344174718, 14: 0.19615436419894028},
        },
        1.0,
    ),
    ({**dict.fromkeys(LAST, 0.047481142235279966), 20: -1.0}, 0.0),
    (
        {
            **dict(zip(FIRST, HELD, strict=True)),
            **dict(zip(LAST, BEHIND, strict=True)),
            20: 1.0,
        },
        1.0,
    ),
)

if __name__ == "__main__":
    program = Minimisation("stages")
    variables = [
        program.non_negative() if number in CONTINUOUS else program.binary() for number in range(21)
    ]
    for add, rows in ((program.equal, EQUAL), (program.at_most, AT_MOST)):
        for terms, constant in rows:
            add([(c, variables[number]) for number, c in terms.items()], constant=constant)
    program.add_cost([(1.0, variables[0]), (1.0, variables[1])])
    print(program.solve(most_checks=100).objective)
