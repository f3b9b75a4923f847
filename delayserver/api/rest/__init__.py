"""All other calls, on FastAPI, and the OpenAPI document that describes both."""
