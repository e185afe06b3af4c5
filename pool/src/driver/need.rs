//! What sandboxes were seen to need, and which starts hold places.

use std::collections::BTreeMap;

use super::{Driver, Entry, Want};
use crate::{
    policy::{Need, Places, StartFor},
    slot::Stage,
};

impl Driver {
    /// Who holds the places for starts.
    pub(super) fn places(&self) -> Places {
        let mut places = Places {
            all: self.parallel.saturating_mul(2),
            ..Places::default()
        };
        let starting =
            |e: &&Entry| matches!(e.slot.stage, Stage::Starting | Stage::Resuming(_)) && !e.slot.vm;
        for entry in self.slots.values().filter(starting) {
            places.hold(entry.start_for);
        }
        places
    }

    /// What the sandbox that is wanted is taken to need.
    pub(super) fn need_of(&self, want: &Want) -> Need {
        match want {
            Want::New { template, .. } => self.need(template),
            Want::Resume { id, .. } => {
                let entry = self.slots.get(id);
                entry.map_or_else(Need::default, |e| self.need(&e.record.template.id))
            }
        }
    }

    /// What sandboxes of a template are taken to need.
    pub(super) fn need(&self, template: &str) -> Need {
        self.needs.get(template).copied().unwrap_or_default()
    }

    /// What sandboxes need, as far as they were measured.
    pub(super) fn estimate(&mut self) {
        let mut sizes: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        let leased = self
            .slots
            .values()
            .filter(|e| e.slot.stage == Stage::Running);
        for entry in leased {
            let of_template = sizes.entry(entry.record.template.id.clone()).or_default();
            of_template.extend(entry.private);
        }
        // A template that was removed is forgotten with its last sandbox.
        let known = &self.templates;
        self.needs
            .retain(|id, _| known.get(id).is_some() || sizes.contains_key(id));
        for (id, sizes) in sizes {
            self.needs.entry(id).or_default().leased(&sizes);
        }
    }
}

impl Want {
    /// What its start is for.
    pub(super) fn start_for(&self) -> StartFor {
        match self {
            Self::New { .. } => StartFor::Create,
            Self::Resume { start, .. } => *start,
        }
    }
}
