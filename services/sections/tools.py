"""The table of formats of tool calls, and the choice for a chat template. Pure."""

from sluice_server.services.sections.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32
from sluice_server.services.sections.formats.gemma3 import GEMMA3
from sluice_server.services.sections.formats.glm45 import GLM45
from sluice_server.services.sections.formats.gpt_oss import GPT_OSS
from sluice_server.services.sections.formats.hermes import HERMES
from sluice_server.services.sections.formats.json_lists import GRANITE, JSON_LIST, PHI4_MINI
from sluice_server.services.sections.formats.kimi_k2 import KIMI_K2
from sluice_server.services.sections.formats.llama3 import LLAMA3
from sluice_server.services.sections.formats.minimax import MINIMAX, MINIMAX_M2
from sluice_server.services.sections.formats.mistral import MISTRAL, MISTRAL_ARGS
from sluice_server.services.sections.formats.pythonic import PYTHONIC
from sluice_server.services.sections.formats.qwen3_coder import QWEN3_CODER
from sluice_server.services.sections.tool_format import ToolFormat

AUTO, NONE = "auto", "none"  # choices besides the names
# In the order in which their signs are looked for: the more special ones first.
_ROWS = (
    GPT_OSS,
    MISTRAL_ARGS,
    MISTRAL,
    QWEN3_CODER,
    GLM45,
    KIMI_K2,
    MINIMAX_M2,
    MINIMAX,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DEEPSEEK_V31,
    GRANITE,
    PHI4_MINI,
    LLAMA3,
    HERMES,
    PYTHONIC,
    GEMMA3,
    JSON_LIST,
)
FORMATS = {row.key: row for row in _ROWS}
NAMES = (AUTO, NONE, *dict.fromkeys(row.name for row in _ROWS if row.name))


def tool_format(template: str, choice: str = AUTO) -> ToolFormat | None:
    """Returns the format that a template's source uses; of several with the chosen name the one with its signs.

    None if there is none, or none is known.
    """
    if choice == NONE:
        return None
    named = [row for row in _ROWS if row.name and choice in (AUTO, row.name)]
    found = next((row for row in named if any(sign in template for sign in row.signs)), None)
    return found or (None if choice == AUTO else named[-1])
