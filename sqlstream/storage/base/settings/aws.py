"""What environment and profile files of AWS say where `storage_options` say nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sqlstream.environment import environment
from sqlstream.errors import ConfigError


def complete_s3(config: dict[str, object], flat: Mapping[str, object], variables: Mapping[str, str] | None = None) -> None:
    """Add what the environment and the AWS profile say, where the options say nothing."""
    env = environment(
        *(
            "AWS_ENDPOINT_URL_S3",
            "AWS_ENDPOINT_URL",
            "S3_ENDPOINT_URL",
            "AWS_ACCESS_KEY_ID",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
        ),
        of=variables,
    )
    named = flat.get("profile")
    has_credentials = "access_key_id" in config or bool(config.get("skip_signature")) or "AWS_ACCESS_KEY_ID" in env
    profile = read_aws_profile(str(named) if named else None, variables) if named or not has_credentials else {}
    if named or not has_credentials:
        for key in ("access_key_id", "secret_access_key", "session_token"):
            if key in profile:
                config.setdefault(key, profile[key])
    if "region" in profile and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(env):
        config.setdefault("region", profile["region"])
    # S3_ENDPOINT_URL is MosaicML Streaming's name for it
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or env.get("S3_ENDPOINT_URL")
    if endpoint := endpoint or profile.get("endpoint"):
        config.setdefault("endpoint", endpoint)


def region_variable(variables: Mapping[str, str]) -> str:
    """Return the region that an environment names, `''` if it names none."""
    return next(iter(environment("AWS_REGION", "AWS_DEFAULT_REGION", of=variables).values()), "")


def has_region() -> bool:
    """Return True if the environment names the AWS region."""
    return bool(environment("AWS_REGION", "AWS_DEFAULT_REGION"))


def read_aws_profile(name: str | None, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return access_key_id, secret_access_key, session_token, region and endpoint of an AWS profile, those that it has.

    Args:
        name: The profile; None: `$AWS_PROFILE`, else the default one, which may be missing.
        variables: The environment; None: as it is now.

    Raises:
        ConfigError: A profile that was named does not exist.
    """
    import configparser  # not at each start of a helper

    env = environment("AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", of=variables)
    explicit = name or env.get("AWS_PROFILE")
    profile = explicit or "default"
    directory = Path(os.path.expanduser("~/.aws"))  # as it stands where the user has no home directory: there is no file
    files = {
        env.get("AWS_CONFIG_FILE", str(directory / "config")): (f"profile {profile}", profile),
        env.get("AWS_SHARED_CREDENTIALS_FILE", str(directory / "credentials")): (profile,),
    }
    values: dict[str, str] = {}
    found = False
    for path, sections in files.items():
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError) as error:
            why = str(error).splitlines()[0].partition(": ")[0] if isinstance(error, configparser.Error) else "it is no text"
            raise ConfigError(
                f"{path} is no configuration of AWS that can be read ({why}): mend it, or set AWS_CONFIG_FILE"
            ) from None
        for section in filter(parser.has_section, sections):
            found = True
            values.update(parser.items(section))
    if explicit and not found:
        raise ConfigError(
            f"AWS profile {explicit!r} is in none of {', '.join(files)}: check storage_options['profile'], AWS_PROFILE"
        )
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
    }
    names |= {"region": "region", "endpoint_url": "endpoint"}
    return {ours: values[theirs] for theirs, ours in names.items() if theirs in values}
