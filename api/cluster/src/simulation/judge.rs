//! Checked properties.

use std::collections::BTreeMap;

use model::SandboxId;

use crate::{
    NodeState, Owner, OwnerState, Route,
    keys::{self, Key},
    mirror::Mirror,
};

use super::{
    server::Note,
    world::{World, template},
};

impl World {
    /// At any time, a sandbox runs on at most one host.
    pub(super) fn check_running(&mut self) {
        let mut running: BTreeMap<&SandboxId, usize> = BTreeMap::new();
        let mut twice = None;
        for (at, host) in self.hosts.iter().enumerate() {
            for id in &host.vms {
                if let Some(other) = running.insert(id, at) {
                    twice = Some(format!("{id} runs on n{other} and n{at}"));
                }
            }
        }
        if let Some(detail) = twice {
            self.fail("one live owner", detail);
        }
    }

    /// Checks that hold after recovery.
    pub(super) fn check_end(&mut self) {
        self.check_views();
        self.check_records();
        let ids: Vec<SandboxId> = self.truths.keys().cloned().collect();
        for id in ids {
            self.check_sandbox(&id);
        }
        self.check_drains();
    }

    /// Every view equals the state of etcd, every node is registered, and the published replicas are the existing ones.
    fn check_views(&mut self) {
        let mut truth = Mirror::new(self.hosts[0].id().clone(), self.signer.verifier());
        truth.list(self.etcd.revision(), self.etcd.entries());
        let truth = truth.view().clone();
        for at in 0..self.hosts.len() {
            let Some(view) = self.view(at) else {
                self.fail("views converge", format!("n{at} has no process"));
                continue;
            };
            let same = [
                ("members", view.members == truth.members),
                ("nodes", view.nodes == truth.nodes),
                ("states", view.states == truth.states),
                ("tags", view.tags == truth.tags),
                ("replicas", view.replicas == truth.replicas),
                ("owners", view.owners == truth.owners),
            ];
            for (part, same) in same {
                if !same {
                    self.fail(
                        "views converge",
                        format!("{part} of n{at}: {view:?}, not {truth:?}"),
                    );
                }
            }
            let host = &self.hosts[at];
            if truth.nodes.get(host.id()) != Some(&host.node) {
                let standing = host
                    .process
                    .as_ref()
                    .map(|process| process.engine.standing());
                self.fail("a node returns", format!("n{at} is {standing:?}"));
            }
            let replicas = truth.replicas.get(&template());
            let is_listed = replicas.is_some_and(|nodes| nodes.contains_key(self.hosts[at].id()));
            if is_listed != self.hosts[at].has_template {
                self.fail("no half template", format!("n{at} listed: {is_listed}"));
            }
        }
    }

    /// Records and notes agree, and nothing is left unfinished.
    fn check_records(&mut self) {
        let mut found: BTreeMap<SandboxId, Owner> = BTreeMap::new();
        for entry in self.etcd.entries() {
            if let Some(Key::Owner(id)) = Key::parse(&entry.key) {
                found.extend(keys::decode(&entry.value).map(|owner| (id, owner)));
            }
        }
        for (id, owner) in &found {
            let at = self.at(&owner.node);
            let local = at.and_then(|at| self.hosts[at].disk.get(id).cloned());
            let agrees = match (local.map(|local| local.note), owner.state) {
                (Some(Note::Running), OwnerState::Running) => true,
                (Some(Note::Paused), OwnerState::Paused) => owner.offered_to.is_none(),
                _ => false,
            };
            if !agrees {
                let notes = self.notes(id);
                self.fail(
                    "records settle",
                    format!("{id}: {owner:?}, notes {notes:?}"),
                );
            }
        }
        for at in 0..self.hosts.len() {
            let unsettled = self.hosts[at].disk.iter().find(|(id, local)| {
                let settled = matches!(local.note, Note::Running | Note::Paused);
                let is_recorded = found
                    .get(*id)
                    .is_some_and(|owner| owner.node == *self.hosts[at].id());
                !settled || (local.owned.is_some() && !is_recorded)
            });
            if let Some((id, local)) = unsettled {
                let detail = format!("{id} on n{at}: {local:?}, record {:?}", found.get(id));
                self.fail("records settle", detail);
            }
        }
    }

    fn notes(&self, id: &SandboxId) -> Vec<Option<Note>> {
        let hosts = self.hosts.iter();
        let notes = hosts.map(|host| host.disk.get(id).map(|local| local.note.clone()));
        notes.collect()
    }

    /// An acknowledged sandbox that was not killed is on one host and every node routes to it, unless its host was
    /// rebooted while it ran. A killed one is nowhere.
    fn check_sandbox(&mut self, id: &SandboxId) {
        let truth = self.truths[id].clone();
        let on: Vec<usize> = (0..self.hosts.len())
            .filter(|at| self.hosts[*at].disk.contains_key(id))
            .collect();
        if truth.ended && !on.is_empty() {
            self.fail("a kill is final", format!("{id} is on {on:?}"));
        }
        if !truth.acknowledged || truth.killed || truth.lost {
            return;
        }
        let [at] = on[..] else {
            self.fail(
                "an acknowledged sandbox is found",
                format!("{id} is on {on:?}: {truth:?}"),
            );
            return;
        };
        for front in 0..self.hosts.len() {
            let Some(view) = self.view(front) else {
                continue;
            };
            let route = view.route(id, &self.home_key);
            let leads = match &route {
                Route::Here => front == at,
                Route::Node { node, .. } => self.at(node) == Some(at),
                Route::Away { .. } | Route::Unknown => false,
            };
            if !leads {
                let detail = format!("{id} is on n{at}, but n{front} has {route:?}");
                self.fail("an acknowledged sandbox is found", detail);
            }
        }
    }

    fn check_drains(&mut self) {
        for at in 0..self.hosts.len() {
            let Some(view) = self.view(at) else {
                continue;
            };
            let state = view.state(self.hosts[at].id());
            if state == NodeState::Draining && !self.hosts[at].disk.is_empty() {
                let left = format!("n{at}: {:?}", self.hosts[at].disk);
                self.fail("a drain ends", left);
            }
        }
    }
}
