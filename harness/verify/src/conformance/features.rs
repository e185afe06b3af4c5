//! The list of features: why each is verified, which SDKs have a case for it, and which SDKs may lack it.

use std::time::Duration;

use clap::ValueEnum;
use serde::Deserialize;

use super::sdk::{Sdk, Suite};
use crate::setup::ListError;

const NAME: &str = "features.toml";
const LIST: &str = include_str!("../../conformance/features.toml");

/// The template that a feature needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Area {
    /// Any template.
    #[default]
    Sandbox,
    /// The template `code-interpreter-v1`, which takes minutes to prepare.
    Interpreter,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Name of the case.
    pub name: String,
    /// Why the feature matters.
    pub why: String,
    pub area: Area,
    /// Suites that have a case for it.
    pub suites: Vec<Suite>,
    /// Names of the SDKs that may lack it.
    pub absent: Vec<String>,
    /// Whether the suite fails if the case does not pass.
    pub must: bool,
    /// Whether the case needs a second server with HTTPS, which only the suite itself can start.
    pub own_server: bool,
    /// Whether the case needs images in a registry, which only the suite itself can start.
    pub registry: bool,
    /// Time limit of the case.
    pub within: Duration,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    feature: Vec<FeatureConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FeatureConfig {
    name: String,
    why: String,
    #[serde(default)]
    area: Area,
    #[serde(default = "both")]
    sdks: Vec<Suite>,
    #[serde(default)]
    absent: Vec<String>,
    #[serde(default = "yes")]
    must: bool,
    #[serde(default)]
    own_server: bool,
    #[serde(default)]
    registry: bool,
    #[serde(default = "a_minute")]
    within: String,
}

fn both() -> Vec<Suite> {
    vec![Suite::Python, Suite::Js]
}

fn yes() -> bool {
    true
}

fn a_minute() -> String {
    "60s".to_owned()
}

/// Decodes the list.
///
/// # Errors
/// Returns a [`ListError`] if the list or an entry is invalid, which is a bug in this program.
pub fn load() -> Result<Vec<Feature>, ListError> {
    let list: List =
        toml::from_str(LIST).map_err(|source| ListError::Toml { list: NAME, source })?;
    let known: Vec<String> = Sdk::all().iter().map(Sdk::name).collect();
    let mut features: Vec<Feature> = Vec::new();
    for config in list.feature {
        let invalid = |fault: String| ListError::Entry {
            list: NAME,
            entry: config.name.clone(),
            fault,
        };
        if features.iter().any(|f| f.name == config.name) {
            return Err(invalid("another feature has the same name".to_owned()));
        }
        if let Some(sdk) = config.absent.iter().find(|sdk| !known.contains(sdk)) {
            return Err(invalid(format!("`absent` names the unknown SDK {sdk}")));
        }
        let within = humantime::parse_duration(&config.within)
            .map_err(|e| invalid(format!("within: {e}")))?;
        features.push(Feature {
            name: config.name,
            why: config.why,
            area: config.area,
            suites: config.sdks,
            absent: config.absent,
            must: config.must,
            own_server: config.own_server,
            registry: config.registry,
            within,
        });
    }
    Ok(features)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_decodes_and_every_feature_has_a_reason() {
        let features = load().unwrap();
        assert!(features.len() >= 100, "{}", features.len());
        for feature in features {
            assert!(!feature.why.is_empty(), "{}", feature.name);
            assert!(!feature.suites.is_empty(), "{}", feature.name);
            assert!(
                feature.within <= Duration::from_secs(240),
                "{}",
                feature.name
            );
        }
    }
}
