//! The list of hazards: what is asked, of which sandboxes, and what the answers must be.

use serde::Deserialize;

use super::Between;
use crate::conformance::features::FeatureError;

const LIST: &str = include_str!("../../conformance/hazards.toml");

/// What the answers must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Rule {
    /// No line is said by both.
    Differs,
    /// All say the same.
    Same,
    /// Nobody says anything.
    Nothing,
    /// What one wrote the other does not have.
    Private,
}

impl Rule {
    /// For people.
    pub(super) fn expected(self) -> &'static str {
        match self {
            Self::Differs => "both say something, and no line is said by both",
            Self::Same => "all say the same, as their parent did",
            Self::Nothing => "nobody says anything",
            Self::Private => "the first has what it wrote, the second has not",
        }
    }
}

/// Who runs a program of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Runner {
    /// A new shell.
    Shell,
    /// A cell of the code interpreter in this language.
    Cell(&'static str),
}

/// One hazard.
#[derive(Clone, Debug)]
pub(super) struct Hazard {
    pub(super) name: String,
    pub(super) why: String,
    pub(super) rule: Rule,
    pub(super) runner: Runner,
    pub(super) probe: String,
    pub(super) between: Vec<Between>,
    pub(super) before: Option<String>,
    pub(super) write: Option<String>,
    pub(super) root: bool,
    pub(super) optional: bool,
    pub(super) known: Option<String>,
    pub(super) sabotage: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    hazard: Vec<HazardConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HazardConfig {
    name: String,
    why: String,
    rule: Rule,
    shell: Option<String>,
    python: Option<String>,
    javascript: Option<String>,
    bash: Option<String>,
    #[serde(default = "both")]
    between: Vec<Between>,
    before: Option<String>,
    write: Option<String>,
    #[serde(default)]
    root: bool,
    #[serde(default)]
    optional: bool,
    known: Option<String>,
    sabotage: Option<String>,
}

fn both() -> Vec<Between> {
    vec![Between::Clones, Between::Forks]
}

/// Reads the list.
///
/// # Errors
/// It is part of the program: an error is a bug.
pub(super) fn load() -> Result<Vec<Hazard>, FeatureError> {
    let list: List = toml::from_str(LIST)?;
    list.hazard.into_iter().map(check).collect()
}

fn check(config: HazardConfig) -> Result<Hazard, FeatureError> {
    let probes = [
        (Runner::Shell, config.shell),
        (Runner::Cell("python"), config.python),
        (Runner::Cell("javascript"), config.javascript),
        (Runner::Cell("bash"), config.bash),
    ];
    let mut probes = probes
        .into_iter()
        .filter_map(|(runner, probe)| Some((runner, probe?)));
    let (Some((runner, probe)), None) = (probes.next(), probes.next()) else {
        return Err(FeatureError::Value {
            name: config.name,
            what: "it has not exactly one probe".to_owned(),
        });
    };
    if (config.rule == Rule::Private) != config.write.is_some() {
        return Err(FeatureError::Value {
            name: config.name,
            what: "`write` goes with the rule `private`".to_owned(),
        });
    }
    Ok(Hazard {
        name: config.name,
        why: config.why,
        rule: config.rule,
        runner,
        probe,
        between: config.between,
        before: config.before,
        write: config.write,
        root: config.root,
        optional: config.optional,
        known: config.known,
        sabotage: config.sabotage,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_one_and_each_name_is_there_once() {
        let hazards = load().unwrap();
        assert!(hazards.len() >= 30, "{}", hazards.len());
        for hazard in &hazards {
            let same = hazards.iter().filter(|h| h.name == hazard.name).count();
            assert_eq!(same, 1, "{}", hazard.name);
            assert!(!hazard.why.is_empty() && !hazard.between.is_empty());
            // What nothing can break could not fail; a difference fails when a sandbox meets itself.
            let breakable =
                hazard.sabotage.is_some() || matches!(hazard.rule, Rule::Differs | Rule::Private);
            assert!(breakable, "{}", hazard.name);
        }
    }
}
