//! The list of features: which case each SDK's suite must have, why, and what may be missing where.

use std::time::Duration;

use clap::ValueEnum;
use serde::Deserialize;

use super::sdk::{Sdk, Suite};

const LIST: &str = include_str!("../../conformance/features.toml");

/// What a feature is verified on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Area {
    /// Sandboxes of any template.
    #[default]
    Sandbox,
    /// Sandboxes of the template `code-interpreter-v1`, which takes minutes to prepare.
    Interpreter,
}

/// One feature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Name of the case.
    pub name: String,
    /// Why it is looked at.
    pub why: String,
    /// What it needs.
    pub area: Area,
    /// Suites that have the case.
    pub suites: Vec<Suite>,
    /// SDKs that cannot do it, by name.
    pub absent: Vec<String>,
    /// Whether the suite fails without it.
    pub must: bool,
    /// Whether it needs the server of the suite's own, with HTTPS beside it.
    pub own_server: bool,
    /// Bound of the case.
    pub within: Duration,
}

/// Why the list is no list. It is part of the program: this is a bug.
#[derive(Debug, thiserror::Error)]
pub enum FeatureError {
    /// Not TOML of the right shape.
    #[error("the list of features is not readable")]
    Toml(#[from] toml::de::Error),
    /// A value that cannot be.
    #[error("feature {name}: {what}")]
    Value {
        /// Its name.
        name: String,
        /// What is wrong.
        what: String,
    },
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

/// Reads the list.
///
/// # Errors
/// See [`FeatureError`].
pub fn load() -> Result<Vec<Feature>, FeatureError> {
    let list: List = toml::from_str(LIST)?;
    let known: Vec<String> = Sdk::all().iter().map(Sdk::name).collect();
    let mut features: Vec<Feature> = Vec::new();
    for config in list.feature {
        let wrong = |what: String| FeatureError::Value {
            name: config.name.clone(),
            what,
        };
        if features.iter().any(|f| f.name == config.name) {
            return Err(wrong("it is there twice".to_owned()));
        }
        if let Some(sdk) = config.absent.iter().find(|sdk| !known.contains(sdk)) {
            return Err(wrong(format!("no SDK is called {sdk}")));
        }
        let within =
            humantime::parse_duration(&config.within).map_err(|e| wrong(format!("within: {e}")))?;
        features.push(Feature {
            name: config.name,
            why: config.why,
            area: config.area,
            suites: config.sdks,
            absent: config.absent,
            must: config.must,
            own_server: config.own_server,
            within,
        });
    }
    Ok(features)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_one_and_every_feature_has_a_reason() {
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
