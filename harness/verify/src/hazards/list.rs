//! The list of hazards. Each has a probe, the sandboxes that it runs in, and a relation between their outputs.

use serde::Deserialize;

use crate::{report::Verdict, setup::ListError};

const NAME: &str = "hazards.toml";
const LIST: &str = include_str!("../../conformance/hazards.toml");

/// The sandboxes that a case compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Between {
    /// Two sandboxes of one template.
    Clones,
    /// Two forks of one running sandbox.
    Forks,
    /// One sandbox, before and after a pause.
    Pause,
}

impl Between {
    /// Name in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Clones => "clones",
            Self::Forks => "forks",
            Self::Pause => "pause",
        }
    }
}

/// Relation that must hold between the outputs of two sandboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Rule {
    /// The outputs have no line in common.
    Differs,
    /// Both outputs are equal, and equal to the parent's.
    Same,
    /// Both outputs are empty.
    Nothing,
    /// The second sandbox does not have the data written in the first.
    Private,
}

impl Rule {
    /// The relation as text, for reports.
    pub(super) fn expected(self) -> &'static str {
        match self {
            Self::Differs => "both answers have lines, and no line is in both",
            Self::Same => "both answers are equal to the parent's",
            Self::Nothing => "both answers are empty",
            Self::Private => "only the first sandbox has what was written in it",
        }
    }

    /// Verdict if the relation does not hold: a fork that lost its parent's state does not work, any other hazard
    /// shares something.
    pub(super) fn broken(self) -> Verdict {
        match self {
            Self::Same => Verdict::Fail,
            Self::Differs | Self::Nothing | Self::Private => Verdict::Breach,
        }
    }
}

/// How a program of the list runs in a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Runner {
    /// As a command of a new shell.
    Shell,
    /// As a cell of the code interpreter, in this language.
    Cell(&'static str),
}

#[derive(Clone, Debug)]
pub(super) struct Hazard {
    pub(super) name: String,
    pub(super) why: String,
    pub(super) rule: Rule,
    pub(super) runner: Runner,
    /// Program that prints the output to compare.
    pub(super) probe: String,
    pub(super) between: Vec<Between>,
    /// Program that runs in the parent before it is forked.
    pub(super) before: Option<String>,
    /// Program that runs in the first sandbox before the probe, for [`Rule::Private`].
    pub(super) write: Option<String>,
    /// Whether the programs run as root.
    pub(super) root: bool,
    /// Whether the subject of the hazard may be missing in the template. Both outputs are then empty.
    pub(super) optional: bool,
    /// Why the hazard is accepted; `None` if it is not.
    pub(super) known: Option<String>,
    /// Why the hazard is for the template's author to judge; `None` if it is not.
    pub(super) warns: Option<String>,
    /// Program that causes the hazard, for [`super::Mode::Sabotage`].
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
    warns: Option<String>,
    sabotage: Option<String>,
}

fn both() -> Vec<Between> {
    vec![Between::Clones, Between::Forks]
}

/// Decodes the list. An error is a bug in this program.
pub(super) fn load() -> Result<Vec<Hazard>, ListError> {
    let list: List =
        toml::from_str(LIST).map_err(|source| ListError::Toml { list: NAME, source })?;
    list.hazard.into_iter().map(check).collect()
}

fn check(config: HazardConfig) -> Result<Hazard, ListError> {
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
        return Err(fault(config.name, "exactly one probe must be given"));
    };
    if (config.rule == Rule::Private) != config.write.is_some() {
        return Err(fault(
            config.name,
            "`write` must be given exactly for the rule `private`",
        ));
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
        warns: config.warns,
        sabotage: config.sabotage,
    })
}

/// Two clones, each of which requests a random value from the start command's processes.
pub(super) fn asked(probe: &str) -> Hazard {
    Hazard {
        name: "answers-of-the-start-command".to_owned(),
        why: "a program that has seeded its generator before the snapshot gives every clone the same numbers".to_owned(),
        rule: Rule::Differs,
        runner: Runner::Shell,
        probe: probe.to_owned(),
        between: vec![Between::Clones],
        before: None,
        write: None,
        root: false,
        optional: false,
        known: None,
        warns: Some("let the program draw secrets from the kernel when it is asked for them".to_owned()),
        sabotage: None,
    }
}

fn fault(entry: String, fault: &str) -> ListError {
    ListError::Entry {
        list: NAME,
        entry,
        fault: fault.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_decodes_and_its_names_are_unique() {
        let hazards = load().unwrap();
        assert!(hazards.len() >= 30, "{}", hazards.len());
        for hazard in &hazards {
            let same = hazards.iter().filter(|h| h.name == hazard.name).count();
            assert_eq!(same, 1, "{}", hazard.name);
            assert!(!hazard.why.is_empty() && !hazard.between.is_empty());
            // The suite must be able to cause each hazard. The rule `differs` fails if a sandbox is compared with
            // itself.
            let breakable =
                hazard.sabotage.is_some() || matches!(hazard.rule, Rule::Differs | Rule::Private);
            assert!(breakable, "{}", hazard.name);
        }
    }
}
