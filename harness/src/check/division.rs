//! Divisions: a run is *closed* if it asked exactly the question of a scenario that this project ships, and else *open*.
//!
//! The target, the gates and the description do not belong to the question. If the sandboxes ran on the harness's own
//! host, the target does: there, its keys choose the pool and the memory of the sandboxes.

use serde_json::Value;

use crate::{
    record,
    scenario::{self, Place, Scenario},
};

/// Name and text of the shipped scenarios.
const SHIPPED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/shipped.rs"));
/// Hashes of the shipped work files, in the format of sha256sum(1).
const WORK: &str = include_str!("../../../scenarios/work/held-out/SHA256SUMS");

/// The question of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Division {
    /// Name of the shipped scenario, and the hash of its question.
    Closed { scenario: String, hash: String },
    /// Why the question is not one of the shipped scenarios.
    Open { why: String },
}

impl Division {
    /// Compares a recorded scenario with the shipped ones of this version. `place` is where its sandboxes ran.
    #[must_use]
    pub fn of(recorded: &Scenario, place: Place) -> Self {
        let asked = question(recorded, place);
        let Some((name, text)) = SHIPPED.iter().find(|(name, _)| *name == recorded.name) else {
            let why = format!("no shipped scenario is named {:?}", recorded.name);
            return Self::Open { why };
        };
        let shipped = match shipped(name, text, place) {
            Ok(shipped) => shipped,
            Err(why) => return Self::Open { why },
        };
        let Some(keys) = differing(&asked, &shipped) else {
            return Self::Closed {
                scenario: (*name).to_owned(),
                hash: record::sha256(asked.to_string().as_bytes()),
            };
        };
        Self::Open {
            why: format!("the keys of scenario {name} are changed: {keys}"),
        }
    }

    /// One line.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Closed { scenario, hash } => {
                format!("closed division: scenario {scenario}, hash {}", &hash[..16])
            }
            Self::Open { why } => format!("open division: {why}"),
        }
    }
}

/// The keys of a scenario that decide what is measured. Maps are sorted, so equal questions have equal texts.
fn question(scenario: &Scenario, place: Place) -> Value {
    let mut question = serde_json::to_value(scenario).unwrap_or_default();
    if let Some(keys) = question.as_object_mut() {
        keys.remove("gates");
        keys.remove("description");
        if place == Place::Elsewhere {
            keys.remove("target");
        }
        let work = scenario.work.as_ref().map(|work| work.sha256.clone());
        keys.insert("work".to_owned(), work.into());
    }
    question
}

/// The question of a shipped scenario. Its work file is known by its hash alone.
fn shipped(name: &str, text: &str, place: Place) -> Result<Value, String> {
    let unreadable = |why: String| format!("scenario {name} of this version cannot be read: {why}");
    let mut keys: toml::Table = text
        .parse()
        .map_err(|e: toml::de::Error| unreadable(e.to_string()))?;
    // Limits may refer to recorded runs, and the work is a file beside the scenario.
    keys.remove("gates");
    let work = keys.remove("work");
    let file = work.as_ref().and_then(|work| work.get("file")?.as_str());
    // Serializing a table that was parsed does not fail.
    let text = toml::to_string(&keys).unwrap_or_default();
    let scenario = scenario::parse(name, &text);
    let scenario = scenario.map_err(|e| unreadable(model::chain(&e)))?;
    let mut question = question(&scenario, place);
    if let (Some(file), Some(keys)) = (file, question.as_object_mut()) {
        let name = file.rsplit('/').next().unwrap_or(file);
        let line = WORK
            .lines()
            .find(|line| line.ends_with(&format!("  {name}")));
        let sum = line.and_then(|line| line.split(' ').next());
        keys.insert("work".to_owned(), sum.into());
    }
    Ok(question)
}

/// The names of differing keys, with the values if they are short; `None` if all are equal.
fn differing(asked: &Value, shipped: &Value) -> Option<String> {
    let (asked, shipped) = (asked.as_object()?, shipped.as_object()?);
    let names = asked
        .keys()
        .chain(shipped.keys().filter(|key| !asked.contains_key(*key)));
    let changed = names.filter(|key| asked.get(*key) != shipped.get(*key));
    let text = |value: Option<&Value>| value.map_or("absent".to_owned(), Value::to_string);
    let changed: Vec<String> = changed
        .map(|key| {
            let (asked, shipped) = (text(asked.get(key)), text(shipped.get(key)));
            if asked.len() + shipped.len() < 40 {
                format!("{key} is {asked} instead of {shipped}")
            } else {
                key.clone()
            }
        })
        .collect();
    (!changed.is_empty()).then(|| changed.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_shipped_scenario_is_closed_and_with_another_key_open() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios");
        let mut files = 0;
        for file in std::fs::read_dir(&dir).unwrap() {
            let path = file.unwrap().path();
            let is_scenario = path.extension().is_some_and(|ending| ending == "toml");
            if !is_scenario || path.ends_with("defaults.toml") {
                continue;
            }
            files += 1;
            let mut scenario = scenario::load(&path, None).unwrap();
            for place in [Place::OwnVms, Place::Elsewhere] {
                let division = Division::of(&scenario, place);
                let is_closed = matches!(division, Division::Closed { .. });
                assert!(is_closed, "{}: {division:?}", path.display());
            }
            scenario.target.template = "another".into();
            let elsewhere = Division::of(&scenario, Place::Elsewhere);
            assert!(matches!(elsewhere, Division::Closed { .. }));
            let here = Division::of(&scenario, Place::OwnVms).describe();
            assert!(here.contains("changed: target"), "{here}");
            scenario.rounds += 1;
            let elsewhere = Division::of(&scenario, Place::Elsewhere).describe();
            assert!(elsewhere.contains("changed: rounds is"), "{elsewhere}");
        }
        assert_eq!(files, SHIPPED.len(), "SHIPPED lists every scenario");
    }
}
