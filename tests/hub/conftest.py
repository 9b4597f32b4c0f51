from hub_fixtures import cache, env, hub, oscar  # noqa: F401
