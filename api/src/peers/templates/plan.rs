//! Decides how this node follows the templates of the others. Pure.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use builds::record::{Home, TemplateRecord};
use cluster::NodeId;

use super::give::{Listed, Shelf, home_of};
use crate::node::deleted::Deleted;

/// Input of the plan.
pub(super) struct Scene<'a> {
    pub(super) this: &'a NodeId,
    /// This node's templates.
    pub(super) own: &'a BTreeMap<String, Arc<TemplateRecord>>,
    /// Shelves of the nodes that just responded.
    pub(super) shelves: BTreeMap<&'a NodeId, &'a Shelf>,
    /// All members. Without this node until etcd has responded for the first time.
    pub(super) members: BTreeSet<&'a NodeId>,
    pub(super) deleted: &'a Deleted,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Templates to remove because they were deleted.
    pub(super) remove: Vec<String>,
    /// Templates that their home has changed.
    pub(super) follow: Vec<(TemplateRecord, Home)>,
    pub(super) take_over: Vec<(String, Home)>,
    /// Builds to copy, newest first.
    pub(super) missing: Vec<Missing>,
    /// Templates of this node whose names belong to older templates.
    pub(super) shadowed: BTreeSet<String>,
}

/// A build that another node has and this one does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Missing {
    pub(super) record: TemplateRecord,
    pub(super) home: Home,
    pub(super) build: String,
    pub(super) source: NodeId,
}

pub(super) fn plan(scene: &Scene) -> Plan {
    let mut plan = Plan::default();
    let listed = scene
        .shelves
        .values()
        .flat_map(|shelf| shelf.templates.keys());
    let ids: BTreeSet<_> = scene.own.keys().chain(listed).collect();
    for id in ids {
        scene.plan_one(id, &mut plan);
    }
    let order = |missing: &Missing| {
        let build = missing.record.build(&missing.build);
        Reverse(build.map_or(0, |build| build.changed_unix_ms))
    };
    plan.missing.sort_by_key(|m| (order(m), m.build.clone()));
    plan
}

/// Orders homes: the later epoch wins, and between equal epochs the first node.
fn rank(home: &Home) -> (u64, Reverse<&NodeId>) {
    (home.epoch, Reverse(&home.node))
}

impl<'a> Scene<'a> {
    fn plan_one(&self, id: &str, plan: &mut Plan) {
        let own = self.own.get(id);
        if self.deleted.has(id) {
            plan.remove.extend(own.map(|_| id.to_owned()));
            return;
        }
        let own_home = own.map(|record| home_of(record, self.this));
        let is_home = own_home
            .as_ref()
            .is_some_and(|home| home.node == *self.this);
        let claims = self
            .listed(id)
            .filter(|(node, listed)| listed.home.node == **node);
        let best = claims.max_by_key(|(_, listed)| rank(&listed.home));
        let best = best.filter(|(_, listed)| {
            let own = own_home.as_ref().filter(|_| is_home);
            own.is_none_or(|own| rank(own) < rank(&listed.home))
        });
        if let Some((node, listed)) = best {
            let here = own.map(|record| record.by_build()).unwrap_or_default();
            let is_other =
                own.is_some_and(|own| **own != listed.record.copied(listed.home.clone(), &here));
            if is_other {
                plan.follow
                    .push((listed.record.clone(), listed.home.clone()));
            }
            self.add_missing(node, listed, &here, plan);
        } else if is_home {
            let is_older =
                own.is_some_and(|own| self.others(own).any(|other| is_before(other, own)));
            plan.shadowed.extend(is_older.then(|| id.to_owned()));
        } else if let Some(home) = own_home {
            plan.take_over.extend(self.take_over(id, &home));
        } else if let Some((node, listed)) = self
            .listed(id)
            .max_by_key(|(node, listed)| (rank(&listed.home), Reverse(*node)))
        {
            // The home is unreachable: any copy will do.
            self.add_missing(node, listed, &BTreeMap::new(), plan);
        }
    }

    fn add_missing(
        &self,
        node: &NodeId,
        listed: &Listed,
        here: &BTreeMap<String, String>,
        plan: &mut Plan,
    ) {
        let record = &listed.record;
        let own = self
            .own
            .values()
            .any(|own| own.name == record.name && own.id != record.id);
        if own || self.others(record).any(|other| is_before(other, record)) {
            return;
        }
        let missing = record
            .by_build()
            .into_keys()
            .filter(|build| !here.contains_key(build));
        plan.missing.extend(missing.map(|build| Missing {
            record: record.clone(),
            home: listed.home.clone(),
            build,
            source: node.clone(),
        }));
    }

    /// The new home of a template, if its home has left or lost it and this node is the first one that has a copy.
    fn take_over(&self, id: &str, home: &Home) -> Option<(String, Home)> {
        let is_known = self.members.contains(self.this);
        let is_lost = !self.members.contains(&home.node) || self.shelves.contains_key(&home.node);
        let mut others = self
            .listed(id)
            .filter(|(_, listed)| !listed.record.builds.is_empty());
        let is_first = others.all(|(node, _)| self.this < node);
        (is_known && is_lost && is_first).then(|| {
            let home = Home {
                node: self.this.clone(),
                epoch: home.epoch + 1,
            };
            (id.to_owned(), home)
        })
    }

    fn listed(&self, id: &str) -> impl Iterator<Item = (&'a NodeId, &'a Listed)> {
        let listed = self.shelves.iter();
        listed.filter_map(move |(node, shelf)| Some((*node, shelf.templates.get(id)?)))
    }

    /// Other templates of the same name on other nodes.
    fn others(&self, record: &TemplateRecord) -> impl Iterator<Item = &'a TemplateRecord> {
        let all = self
            .shelves
            .values()
            .flat_map(|shelf| shelf.templates.values());
        all.map(|listed| &listed.record)
            .filter(|other| other.name == record.name && other.id != record.id)
            .filter(|other| !self.deleted.has(&other.id))
    }
}

/// Between two templates with one name, the older one has it.
fn is_before(one: &TemplateRecord, other: &TemplateRecord) -> bool {
    (one.created_unix_ms, &one.id) < (other.created_unix_ms, &other.id)
}

#[cfg(test)]
#[path = "plan/tests.rs"]
mod tests;
