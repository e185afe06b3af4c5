//! Compares the responses with the sandboxes that exist at the end.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use testbed::api::Api;

use super::{
    event::{Fate, Record},
    line::{Pace, Trouble, connect},
};

/// The sandboxes that exist, as the server lists them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Existing {
    pub running: BTreeSet<String>,
    pub paused: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Shown {
    #[serde(rename = "sandboxID")]
    id: String,
    state: String,
}

impl Existing {
    /// Lists the running sandboxes, and looks up the others that the records name. `None` if the server does not
    /// respond.
    pub(super) fn read(api: &Api, records: &[Record]) -> Option<Self> {
        let get = |path: &str| {
            let mut client = connect(api, &api.control, Pace::Full)?;
            Ok::<_, Trouble>(api.request(&mut client, "GET", path, b"")?)
        };
        let listed = get("/sandboxes")
            .ok()
            .filter(|answer| answer.status == 200)?;
        let listed: Vec<Shown> = serde_json::from_slice(&listed.body).ok()?;
        let mut existing = Self {
            running: listed.into_iter().map(|shown| shown.id).collect(),
            paused: BTreeSet::new(),
        };
        for id in fates(records.iter()).0.keys() {
            if existing.running.contains(*id) {
                continue;
            }
            let answer = get(&format!("/sandboxes/{id}")).ok()?;
            let shown = serde_json::from_slice::<Shown>(&answer.body);
            if shown.is_ok_and(|shown| shown.state == "paused") {
                existing.paused.insert((*id).to_owned());
            }
        }
        Some(existing)
    }
}

/// The last fate of each sandbox, and the number of creates without a response.
#[must_use]
pub fn fates<'a>(records: impl Iterator<Item = &'a Record>) -> (BTreeMap<&'a str, Fate>, usize) {
    let mut fates = BTreeMap::new();
    let mut unanswered = 0;
    for record in records {
        match record {
            Record::Fate { id, fate } => {
                fates.insert(id.as_str(), *fate);
            }
            Record::PerhapsBorn => unanswered += 1,
            Record::Event(_) => {}
        }
    }
    (fates, unanswered)
}

/// Differences between the responses and the existing sandboxes, one line each. An excess of unknown sandboxes over
/// unanswered creates is one difference.
#[must_use]
pub fn audit<'a>(records: impl Iterator<Item = &'a Record>, existing: &Existing) -> Vec<String> {
    let (fates, unanswered) = fates(records);
    let mut found = Vec::new();
    for (id, fate) in &fates {
        let (runs, sleeps) = (
            existing.running.contains(*id),
            existing.paused.contains(*id),
        );
        let fault = match fate {
            Fate::Running if !runs => Some("was running, and does not run"),
            Fate::Paused if !sleeps => Some("was paused, and is not paused"),
            Fate::Either if !runs && !sleeps => Some("was running or paused, and does not exist"),
            Fate::Gone if runs || sleeps => Some("was killed, and exists"),
            Fate::Running | Fate::Paused | Fate::Either | Fate::Gone | Fate::PerhapsGone => None,
        };
        found.extend(fault.map(|fault| format!("sandbox {id} {fault}")));
    }
    let all = existing.running.union(&existing.paused);
    let unknown: Vec<&str> = all
        .map(String::as_str)
        .filter(|id| !fates.contains_key(id))
        .collect();
    if unknown.len() > unanswered {
        found.push(format!(
            "{} sandboxes exist that no answer named, but only {unanswered} creates were not answered: {}",
            unknown.len(),
            unknown.join(", ")
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fate(id: &str, fate: Fate) -> Record {
        Record::Fate {
            id: id.into(),
            fate,
        }
    }

    fn existing(running: &[&str], paused: &[&str]) -> Existing {
        let set = |ids: &[&str]| ids.iter().map(ToString::to_string).collect();
        Existing {
            running: set(running),
            paused: set(paused),
        }
    }

    #[test]
    fn a_lost_sandbox_is_noticed_in_every_state() {
        let records = [
            fate("a", Fate::Running),
            fate("b", Fate::Running),
            fate("b", Fate::Paused),
            fate("c", Fate::Either),
            fate("d", Fate::Gone),
            fate("e", Fate::PerhapsGone),
        ];
        let audit = |existing: &Existing| audit(records.iter(), existing);
        let nothing: Vec<String> = Vec::new();
        assert_eq!(audit(&existing(&["a", "c"], &["b"])), nothing);
        assert_eq!(audit(&existing(&["a", "e"], &["b", "c"])), nothing);
        assert_eq!(
            audit(&existing(&["b", "d"], &["a"])),
            [
                "sandbox a was running, and does not run",
                "sandbox b was paused, and is not paused",
                "sandbox c was running or paused, and does not exist",
                "sandbox d was killed, and exists",
            ]
        );
    }

    #[test]
    fn only_as_many_unknown_sandboxes_as_unanswered_creates_are_accepted() {
        let one = [Record::PerhapsBorn];
        assert_eq!(
            audit(one.iter(), &existing(&["x"], &[])),
            Vec::<String>::new()
        );
        let found = audit(one.iter(), &existing(&["x"], &["y"]));
        assert_eq!(
            found,
            ["2 sandboxes exist that no answer named, but only 1 creates were not answered: x, y"]
        );
    }
}
