"""Plans of large models beside their scripts, and first commands; tables with -s."""

import check_plans
import first_command
import pytest

pytestmark = pytest.mark.bench


def test_large_plans_hold():
    """ZeRO-3 under a pipeline is planned with more memory than its script needs."""
    assert check_plans.main() >= len(check_plans.CASES) - 2


def test_first_commands_start():
    first_command.main()
