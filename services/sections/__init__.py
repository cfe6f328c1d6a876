"""The sections of a chat's output: formats of tool calls and of reasoning, and the splitters that find them. Pure."""
