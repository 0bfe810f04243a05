"""An OpenAI-style endpoint over one placed model: Starlette and uvicorn around one model thread."""
