//! The config of an image, from which a template takes its defaults.

use serde::Deserialize;

use crate::digest::Digest;

/// Limit for the size of a config, in bytes.
pub const MAX_CONFIG: u64 = 4 << 20;

/// Defaults that an image gives to a template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Defaults {
    /// Names and values in the image's order. E2B's `fromImage` takes only these from the image.
    pub env: Vec<(String, String)>,
    /// Name or number of the user, and of the group after a colon. `None`: root.
    pub user: Option<String>,
    /// `None`: `/`.
    pub workdir: Option<String>,
    /// Both together are the command that a container would run.
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    /// For example `8080/tcp`. Sorted.
    pub exposed_ports: Vec<String>,
}

/// A parsed config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub defaults: Defaults,
    /// Digests of the unpacked layers, lowest first.
    pub diff_ids: Vec<Digest>,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("config of the image is not valid")]
    Json(#[source] serde_json::Error),
    #[error("image is for {os}/{architecture}: only linux/amd64 is supported")]
    Platform { os: String, architecture: String },
    #[error("config of the image lists {listed} layers, but its manifest {found}")]
    Layers { listed: usize, found: usize },
    #[error(
        "config of the image has the invalid environment variable {0:?}: NAME=VALUE is expected"
    )]
    Env(String),
    #[error("config of the image has a NUL in {0}")]
    Nul(&'static str),
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    config: Option<RawDefaults>,
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Option<Vec<Digest>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RawDefaults {
    env: Option<Vec<String>>,
    user: Option<String>,
    working_dir: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    exposed_ports: Option<std::collections::BTreeMap<String, serde_json::Value>>,
}

impl Config {
    /// Parses the config of an image with `layers` layers.
    ///
    /// # Errors
    /// Returns an error if the config is malformed, for another platform, or lists another number of layers.
    pub fn parse(bytes: &[u8], layers: usize) -> Result<Self, ConfigError> {
        let raw: Raw = serde_json::from_slice(bytes).map_err(ConfigError::Json)?;
        if (raw.os.as_str(), raw.architecture.as_str()) != ("linux", "amd64") {
            return Err(ConfigError::Platform {
                os: raw.os,
                architecture: raw.architecture,
            });
        }
        let diff_ids = raw.rootfs.diff_ids.unwrap_or_default();
        if diff_ids.len() != layers {
            return Err(ConfigError::Layers {
                listed: diff_ids.len(),
                found: layers,
            });
        }
        let defaults = raw.config.unwrap_or_default().check()?;
        Ok(Self { defaults, diff_ids })
    }
}

impl RawDefaults {
    fn check(self) -> Result<Defaults, ConfigError> {
        let env = self.env.unwrap_or_default();
        let env = env.into_iter().map(|pair| match pair.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
            _ => Err(ConfigError::Env(pair.chars().take(100).collect())),
        });
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        let ports = self.exposed_ports.unwrap_or_default();
        let defaults = Defaults {
            env: env.collect::<Result<_, _>>()?,
            user: given(self.user),
            workdir: given(self.working_dir),
            entrypoint: self.entrypoint.unwrap_or_default(),
            cmd: self.cmd.unwrap_or_default(),
            exposed_ports: ports.into_keys().collect(),
        };
        defaults.check_nuls()?;
        Ok(defaults)
    }
}

impl Defaults {
    /// Strings with a NUL cannot be passed to a process.
    fn check_nuls(&self) -> Result<(), ConfigError> {
        let has_nul = |text: &String| text.contains('\0');
        if self
            .env
            .iter()
            .any(|(name, value)| has_nul(name) || has_nul(value))
        {
            return Err(ConfigError::Nul("Env"));
        }
        if self.entrypoint.iter().chain(&self.cmd).any(has_nul) {
            return Err(ConfigError::Nul("Entrypoint or Cmd"));
        }
        if self.user.iter().chain(&self.workdir).any(has_nul) {
            return Err(ConfigError::Nul("User or WorkingDir"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_read_from_configs_of_docker_and_minimal_ones() {
        let text = r#"{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/bin:/a=b","E="],"User":"app",
            "WorkingDir":"","Entrypoint":null,"Cmd":["a","b"],"ExposedPorts":{"80/tcp":{}},"Labels":{"x":"y"}},
            "rootfs":{"type":"layers","diff_ids":[]},"history":[{}]}"#;
        let defaults = Config::parse(text.as_bytes(), 0).unwrap().defaults;
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(defaults.env, [pair("PATH", "/bin:/a=b"), pair("E", "")]);
        assert_eq!(
            (defaults.user.as_deref(), defaults.workdir),
            (Some("app"), None)
        );
        assert_eq!((defaults.cmd.len(), defaults.entrypoint.len()), (2, 0));
        assert_eq!(defaults.exposed_ports, ["80/tcp"]);
        let least = br#"{"architecture":"amd64","os":"linux","rootfs":{}}"#;
        assert_eq!(
            Config::parse(least, 0).unwrap().defaults,
            Defaults::default()
        );
    }

    #[test]
    fn configs_that_cannot_be_used_are_refused() {
        let with = |config: &str| {
            let text = format!(
                r#"{{"architecture":"amd64","os":"linux","rootfs":{{}},"config":{config}}}"#
            );
            Config::parse(text.as_bytes(), 0).unwrap_err().to_string()
        };
        assert!(with(r#"{"Env":["=a"]}"#).contains("environment"));
        assert!(with(r#"{"Env":["a=\u0000"]}"#).contains("NUL"));
        assert!(with(r#"{"Cmd":["\u0000"]}"#).contains("NUL"));
        assert!(with(r#"{"Cmd":"sh"}"#).contains("not valid"));
        let arm = br#"{"architecture":"arm64","os":"linux","rootfs":{}}"#;
        assert!(
            Config::parse(arm, 0)
                .unwrap_err()
                .to_string()
                .contains("arm64")
        );
        let amd = br#"{"architecture":"amd64","os":"linux","rootfs":{}}"#;
        assert!(matches!(
            Config::parse(amd, 1),
            Err(ConfigError::Layers {
                listed: 0,
                found: 1
            })
        ));
    }
}
