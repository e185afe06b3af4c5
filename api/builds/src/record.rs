//! The record of a client's template: its builds, and the builds that its tags refer to. Pure.
//!
//! ```text
//! Waiting ──start──► Started ──finish──► Ready (its tags move to it)
//!    │         redo ─►  │ finish, recover
//!    └── superseded,    └──────────────► Failed
//!        too late ──────────────────────►
//! ```
//! Ready and Failed are final. A ready build that loses its last tag also loses its template in the pool.

use std::collections::{BTreeMap, BTreeSet};

use cluster::{NodeId, Tagged};
use model::Bytes;
use serde::{Deserialize, Serialize};

/// Number of ended, untagged builds kept per template.
const KEPT_BUILDS: usize = 20;
/// The official clients match this text.
pub(super) const SUPERSEDED: &str =
    "The build was canceled because it was superseded by a newer one.";
pub(super) const RESTARTED: &str =
    "the server was stopped or restarted during the build: start the build again";
pub(super) const TOO_LATE: &str =
    "the build was not started within a day of its request: request it again";

/// A template and its builds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateRecord {
    /// 20 lower-case letters and digits; never changes.
    pub id: String,
    /// Without a tag.
    pub name: String,
    pub created_unix_ms: u64,
    /// Set by clients. Has no effect, because there is only one team.
    pub public: bool,
    /// Oldest first.
    pub builds: Vec<BuildRecord>,
    pub tags: BTreeMap<String, TagRecord>,
    /// The node of a cluster that builds and changes the template. The others have copies of its tagged builds. `None`:
    /// this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<Home>,
}

/// The node that changes a template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Home {
    pub node: NodeId,
    /// Incremented when another node takes over the template because its home has left the cluster.
    pub epoch: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TagRecord {
    /// Id of a ready build.
    pub build: String,
    pub assigned_unix_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuildRecord {
    /// A UUID.
    pub id: String,
    /// The tags that it gets once it is ready. Not empty.
    pub wanted: BTreeSet<String>,
    pub vcpus: u8,
    pub memory: Bytes,
    /// Minimum free disk space of sandboxes. Absent in records of older releases.
    #[serde(default)]
    pub min_free_disk: Bytes,
    pub created_unix_ms: u64,
    /// Time of the last change of `state`.
    pub changed_unix_ms: u64,
    pub state: BuildState,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case", deny_unknown_fields)]
pub enum BuildState {
    /// Requested. The client uploads files.
    Waiting,
    /// Queued or running.
    Started,
    Ready {
        /// Id of the template in the pool; `None` once the build has lost its last tag.
        template: Option<String>,
    },
    Failed(Reason),
}

/// Why a build failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reason {
    pub message: String,
    /// The failed part of the build, as the text of [`super::plan::At`].
    pub step: Option<String>,
}

impl Reason {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            step: None,
        }
    }
}

impl BuildState {
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Ready { .. } | Self::Failed(_))
    }
}

impl TemplateRecord {
    pub fn new(id: String, name: String, now_ms: u64) -> Self {
        Self {
            id,
            name,
            created_unix_ms: now_ms,
            public: false,
            builds: Vec::new(),
            tags: BTreeMap::new(),
            home: None,
        }
    }

    /// The record with only the builds that other nodes need, which are the tagged ones.
    #[must_use]
    pub fn shared(&self) -> Self {
        let tagged: BTreeSet<_> = self.tags.values().map(|tag| &tag.build).collect();
        let builds = self
            .builds
            .iter()
            .filter(|build| tagged.contains(&build.id));
        Self {
            builds: builds.cloned().collect(),
            ..self.clone()
        }
    }

    /// The home's record restricted to this node's copies. `here` maps the builds on this node to their templates in
    /// the pool.
    pub fn copied(&self, home: Home, here: &BTreeMap<String, String>) -> Self {
        let mut copy = self.shared();
        copy.home = Some(home);
        copy.builds.retain_mut(|build| {
            let template = here.get(&build.id).cloned();
            let is_here = template.is_some();
            build.state = BuildState::Ready { template };
            is_here
        });
        copy.tags.retain(|_, tag| here.contains_key(&tag.build));
        copy
    }

    /// Templates in the pool by build, for builds that have one.
    pub fn by_build(&self) -> BTreeMap<String, String> {
        let ready = self.builds.iter().filter_map(|build| match &build.state {
            BuildState::Ready { template } => Some((build.id.clone(), template.clone()?)),
            _ => None,
        });
        ready.collect()
    }

    #[must_use]
    pub fn build(&self, id: &str) -> Option<&BuildRecord> {
        self.builds.iter().find(|build| build.id == id)
    }

    /// The build that a tag refers to, and its template in the pool.
    #[must_use]
    pub fn tagged(&self, tag: &str) -> Option<(&BuildRecord, &str)> {
        let build = self.build(&self.tags.get(tag)?.build)?;
        match &build.state {
            BuildState::Ready {
                template: Some(template),
            } => Some((build, template)),
            _ => None,
        }
    }

    /// The build that a tag refers to, in the form that nodes of a cluster compare.
    pub fn named(&self, tag: &str) -> Option<Tagged> {
        Some(Tagged {
            template: self.id.parse().ok()?,
            tag: tag.to_owned(),
            build: self.tags.get(tag)?.build.clone(),
        })
    }

    /// The templates in the pool that this record needs.
    pub fn pool_ids(&self) -> BTreeSet<String> {
        let ids = self.builds.iter().filter_map(|build| match &build.state {
            BuildState::Ready { template } => template.clone(),
            _ => None,
        });
        ids.collect()
    }

    /// The names that each template in the pool should have.
    pub fn pool_names(&self) -> BTreeMap<String, String> {
        let names = self.tags.keys().filter_map(|tag| {
            let (_, template) = self.tagged(tag)?;
            Some((pool_name(&self.name, tag), template.to_owned()))
        });
        names.collect()
    }

    /// Adds a build. Waiting builds with one of its tags fail.
    pub(super) fn request(&mut self, build: BuildRecord) {
        let now_ms = build.created_unix_ms;
        for other in &mut self.builds {
            if other.state == BuildState::Waiting && !other.wanted.is_disjoint(&build.wanted) {
                other.fail(Reason::new(SUPERSEDED), now_ms);
            }
        }
        self.builds.push(build);
        self.prune();
    }

    /// Starts a waiting build. Returns the started builds that it supersedes, or `None` if it is not waiting.
    pub(super) fn start(&mut self, id: &str, now_ms: u64) -> Option<Vec<String>> {
        let build = self.builds.iter_mut().find(|build| build.id == id)?;
        if build.state != BuildState::Waiting {
            return None;
        }
        build.state = BuildState::Started;
        build.changed_unix_ms = now_ms;
        let wanted = build.wanted.clone();
        let older = self.builds.iter().filter(|other| {
            other.id != id
                && other.state == BuildState::Started
                && !other.wanted.is_disjoint(&wanted)
        });
        Some(older.map(|build| build.id.clone()).collect())
    }

    /// The tags that refer to a build.
    pub fn tags_of(&self, id: &str) -> BTreeSet<String> {
        let tags = self.tags.iter().filter(|(_, tag)| tag.build == id);
        tags.map(|(name, _)| name.clone()).collect()
    }

    /// Adds a started build that repeats another one. Builds that wait for their start remain, because they were
    /// ordered later.
    pub(super) fn redo(&mut self, build: BuildRecord) {
        self.builds.push(build);
        self.prune();
    }

    /// Whether the order of a build is needed, to run or to repeat it.
    pub(super) fn needs_order(&self, id: &str) -> bool {
        self.build(id).is_some_and(|build| match &build.state {
            BuildState::Waiting | BuildState::Started => true,
            BuildState::Ready { template } => template.is_some(),
            BuildState::Failed(_) => false,
        })
    }

    /// Ends a started build, either with a template in the pool, which gets the build's tags, or with a reason. Does
    /// nothing if the build is not running.
    pub(super) fn finish(&mut self, id: &str, outcome: Result<String, Reason>, now_ms: u64) {
        let Some(build) = self.started(id) else {
            return;
        };
        match outcome {
            Err(reason) => build.fail(reason, now_ms),
            Ok(template) => {
                let tags = build.wanted.clone();
                build.succeed(template, now_ms);
                self.point(id, tags, now_ms);
            }
        }
        self.prune();
    }

    /// Ends a started build that repeats the build `former`. Its template gets the tags that still refer to that build.
    pub(super) fn finish_redo(&mut self, id: &str, former: &str, template: String, now_ms: u64) {
        let mut tags = self.tags_of(former);
        let Some(build) = self.started(id) else {
            return;
        };
        tags.retain(|tag| build.wanted.contains(tag));
        build.succeed(template, now_ms);
        self.point(id, tags, now_ms);
        self.prune();
    }

    fn started(&mut self, id: &str) -> Option<&mut BuildRecord> {
        let mut builds = self.builds.iter_mut();
        builds.find(|build| build.id == id && build.state == BuildState::Started)
    }

    /// Assigns tags to the build that `tag` refers to. Returns the build's id, or `None` if the tag does not exist.
    pub(super) fn assign(
        &mut self,
        tag: &str,
        tags: BTreeSet<String>,
        now_ms: u64,
    ) -> Option<String> {
        let id = self.tagged(tag)?.0.id.clone();
        self.point(&id, tags, now_ms);
        self.prune();
        Some(id)
    }

    /// Removes tags. Unknown tags are ignored.
    pub(super) fn unassign(&mut self, tags: &BTreeSet<String>) {
        self.tags.retain(|tag, _| !tags.contains(tag));
        self.prune();
    }

    /// Ends what the previous server left unfinished.
    pub(super) fn recover(&mut self, now_ms: u64) {
        for build in &mut self.builds {
            if build.state == BuildState::Started {
                build.fail(Reason::new(RESTARTED), now_ms);
            }
        }
        self.prune();
    }

    /// Whether [`TemplateRecord::expire`] would end a build.
    pub(super) fn is_overdue(&self, since_ms: u64) -> bool {
        self.builds.iter().any(|build| build.is_overdue(since_ms))
    }

    /// Ends builds that have waited since before `since_ms`.
    pub(super) fn expire(&mut self, since_ms: u64, now_ms: u64) {
        for build in self.builds.iter_mut().filter(|b| b.is_overdue(since_ms)) {
            build.fail(Reason::new(TOO_LATE), now_ms);
        }
        self.prune();
    }

    fn point(&mut self, build: &str, tags: BTreeSet<String>, now_ms: u64) {
        for tag in tags {
            let record = TagRecord {
                build: build.to_owned(),
                assigned_unix_ms: now_ms,
            };
            self.tags.insert(tag, record);
        }
    }

    /// Releases templates of untagged builds, and forgets the oldest of these builds.
    fn prune(&mut self) {
        let tagged: BTreeSet<_> = self.tags.values().map(|tag| tag.build.clone()).collect();
        for build in &mut self.builds {
            if let BuildState::Ready { template } = &mut build.state
                && !tagged.contains(&build.id)
            {
                *template = None;
            }
        }
        let is_over = |build: &BuildRecord| build.state.is_final() && !tagged.contains(&build.id);
        let mut surplus = self.builds.iter().filter(|b| is_over(b)).count();
        surplus = surplus.saturating_sub(KEPT_BUILDS);
        self.builds.retain(|build| {
            let goes = surplus > 0 && is_over(build);
            surplus -= usize::from(goes);
            !goes
        });
    }

    /// Returns why this module cannot have written the record, or `None` if it can.
    pub fn check(&self) -> Option<String> {
        if !is_id(&self.id) || super::request::split(&self.name) != Ok((self.name.as_str(), None)) {
            return Some("its id or its name is malformed".to_owned());
        }
        let mut ids = BTreeSet::new();
        for build in &self.builds {
            if !is_uuid(&build.id) || !ids.insert(&build.id) || build.wanted.is_empty() {
                return Some(format!("build {:?} is malformed or listed twice", build.id));
            }
            let has_tag = self.tags.values().any(|tag| tag.build == build.id);
            if let BuildState::Ready { template } = &build.state
                && template.is_some() != has_tag
            {
                return Some(format!("tags and template of build {} disagree", build.id));
            }
        }
        let lost = self.tags.keys().find(|tag| self.tagged(tag).is_none())?;
        Some(format!("the tag {lost:?} does not refer to a ready build"))
    }
}

impl BuildRecord {
    fn is_overdue(&self, since_ms: u64) -> bool {
        self.state == BuildState::Waiting && self.created_unix_ms < since_ms
    }

    fn succeed(&mut self, template: String, now_ms: u64) {
        self.state = BuildState::Ready {
            template: Some(template),
        };
        self.changed_unix_ms = now_ms;
    }

    fn fail(&mut self, reason: Reason, now_ms: u64) {
        self.state = BuildState::Failed(reason);
        self.changed_unix_ms = now_ms;
    }
}

/// The name of `name:tag` in the pool.
pub(super) fn pool_name(name: &str, tag: &str) -> String {
    if tag == super::request::DEFAULT_TAG {
        name.to_owned()
    } else {
        format!("{name}:{tag}")
    }
}

fn is_id(id: &str) -> bool {
    id.len() == 20
        && id
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}

fn is_uuid(id: &str) -> bool {
    id.len() == 36
        && id.bytes().enumerate().all(|(at, b)| match at {
            8 | 13 | 18 | 23 => b == b'-',
            _ => matches!(b, b'0'..=b'9' | b'a'..=b'f'),
        })
}

#[cfg(test)]
#[path = "record/tests.rs"]
pub(super) mod tests;
