//! Replication of built templates: each ready node copies every tagged build from nodes of its platform, newest first.
//!
//! ```text
//! every 3 s*  others ─ POST /cluster/templates ─► shelves ─► plan (pure) ─┬─► deleted templates are removed
//!                                                                         ├─► tags follow the home's
//!                                                                         └─► one missing build at a time:
//! POST /cluster/template/offer ─► files ─ transfer ─► <state>/builds/copies/<build> ─► memory created ─► named
//! ```
//! \* At once if a copy is outdated ([`tags`]).
//!
//! A template has a home: the node that builds and changes it, and to which requests about it are forwarded. The other
//! nodes have copies of its tagged builds. Disks (root image and layer) are transferred. The memory is created on each
//! node, as at the end of a build. A copy gets its names, and is published as a replica, once sandboxes can be cloned
//! from it.
//!
//! Invariants:
//! - A deleted template must not come back: deletions are kept longer than a node can be unreachable, and all nodes
//!   merge them.
//! - Two nodes must not change one template: the home with the later epoch wins, and the other node follows it.

mod give;
mod plan;
mod tags;
mod take;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use builds::{
    owner::{Builds, BuildsError, Copied},
    run::Executor,
};
use cluster::{NodeId, NodeState};
use model::clock::unix_ms;
use rest::NodeStatus;
use tasks::{blocking, boxed};
use tokio::{task::JoinSet, time::Instant};

use super::{PeerError, Peers, question};
use crate::node::OwnNode;
use crate::node::{deleted::Deleted, settings::Dir};
pub(crate) use give::{Asked, Kept, Page, WantedBuild, offer, shelf};
use give::{Pages, Shelf};
use plan::{Missing, Plan, Scene};
pub(crate) use tags::Announced;
use tags::DeletedHere;
use take::TakeError;

/// A file in the directory of cluster settings.
const DELETED: &str = "deleted-templates.json";
/// Polling interval of the nodes' templates.
const EVERY: Duration = Duration::from_secs(3);
/// Polling interval while a copy of this node is outdated because its home does not respond, and the number of such
/// polls.
const SOON: Duration = Duration::from_millis(250);
const SOON_TIMES: u32 = 20;
/// How often incomplete copies without a pending attempt are cleaned up.
const CLEAN: Duration = Duration::from_secs(3600);
/// Delay before a failed copy is retried: initial, maximum, and maximum if the other node did not respond.
const AGAIN: Duration = Duration::from_secs(5);
const AGAIN_MOST: Duration = Duration::from_secs(600);
const AGAIN_AWAY: Duration = Duration::from_secs(15);

/// This node's view of the cluster's templates. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Templates(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    deleted: Mutex<Deleted>,
    deleted_here: Mutex<DeletedHere>,
    /// Locked while the deletions are written.
    writing: tokio::sync::Mutex<()>,
    /// Ids of templates of this node whose names belong to older templates of other nodes.
    shadowed: Mutex<BTreeSet<String>>,
    kept: Kept,
    counters: Counters,
}

/// Counters for metrics.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) copied: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) missing: AtomicU64,
}

/// The parts of the server that copies need.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    pub(crate) builds: Builds,
    pub(crate) executor: Executor,
    pub(crate) node: OwnNode,
    /// Directory of incomplete copies.
    pub(crate) dir: PathBuf,
}

impl Templates {
    pub(super) fn new(dir: &Dir) -> Self {
        Self(Arc::new(Inner {
            deleted: Mutex::new(Deleted::load(&dir.path(DELETED))),
            deleted_here: Mutex::default(),
            writing: tokio::sync::Mutex::default(),
            shadowed: Mutex::default(),
            kept: Kept::default(),
            counters: Counters::default(),
        }))
    }

    /// Records the deletion of a template on this node. The other nodes learn of it later. When it returns, the
    /// deletion is on disk.
    ///
    /// # Errors
    /// Returns an error if it cannot be written.
    pub(crate) async fn delete(&self, dir: &Dir, template: &str) -> Result<(), BuildsError> {
        self.merge(dir, BTreeMap::from([(template.to_owned(), unix_ms())]))
            .await
    }

    async fn merge(&self, dir: &Dir, deleted: BTreeMap<String, u64>) -> Result<(), BuildsError> {
        let _writing = self.0.writing.lock().await;
        let changed = self.deleted().merged(deleted, unix_ms());
        let Some(changed) = changed else {
            return Ok(());
        };
        let (to, written) = (dir.path(DELETED), changed.clone());
        let written = blocking(move || written.store(&to)).await;
        written.map_err(BuildsError::Store)?;
        *self.deleted() = changed;
        Ok(())
    }

    /// Whether the names of a template of this node belong to an older one on another node.
    pub(super) fn is_shadowed(&self, template: &str) -> bool {
        self.shadowed().contains(template)
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.0.counters
    }

    pub(crate) fn kept(&self) -> &Kept {
        &self.0.kept
    }

    fn deleted(&self) -> MutexGuard<'_, Deleted> {
        lock(&self.0.deleted)
    }

    fn shadowed(&self) -> MutexGuard<'_, BTreeSet<String>> {
        lock(&self.0.shadowed)
    }
}

/// Ignores poisoning: the protected data is consistent after each statement that can panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A copy that has failed.
struct Failed {
    times: u32,
    not_before: Instant,
}

/// Follows the templates of all nodes; never returns.
pub(crate) async fn follow(peers: Peers, parts: Parts) {
    let mut shelves: BTreeMap<NodeId, Shelf> = BTreeMap::new();
    let mut failed: BTreeMap<String, Failed> = BTreeMap::new();
    let mut copies = JoinSet::new();
    let mut cleaned = None::<Instant>;
    let mut soon = 0;
    loop {
        if copies.is_empty() && cleaned.is_none_or(|at| at.elapsed() > CLEAN) {
            cleaned = Some(Instant::now());
            let done = take::clean_all(parts.dir.clone()).await;
            if let Err(why) = done {
                tracing::warn!(%why, "cannot remove incomplete copies of templates");
            }
        }
        let answered = ask_all(&peers, &mut shelves).await;
        let plan = act(&peers, &parts, &shelves, &answered).await;
        failed.retain(|build, _| plan.missing.iter().any(|m| m.build == *build));
        if copies.is_empty()
            && is_open(&peers, &parts)
            && let Some(next) = next(&peers, &plan.missing, &failed)
        {
            let (peers, parts, next) = (peers.clone(), parts.clone(), next.clone());
            copies.spawn(boxed(async move {
                (take::take(&peers, &parts, &next).await, next)
            }));
        }
        let is_behind = peers.is_behind(&parts.builds);
        soon = if is_behind { soon + 1 } else { 0 };
        let pause = match soon {
            1..=SOON_TIMES => SOON,
            _ => EVERY,
        };
        tokio::select! {
            Some(ended) = copies.join_next() => match ended {
                Ok((outcome, missing)) => note(&peers, &mut failed, outcome, &missing),
                Err(why) => tracing::error!(%why, "the task that copies a template failed"),
            },
            () = peers.until_behind(&parts.builds), if !is_behind => {}
            () = tokio::time::sleep(pause) => {}
        }
        peers.templates().kept().expire();
    }
}

/// Requests the templates of all other nodes. Returns those that responded.
async fn ask_all(peers: &Peers, shelves: &mut BTreeMap<NodeId, Shelf>) -> BTreeSet<NodeId> {
    let mut asked = JoinSet::new();
    for node in peers.others() {
        let known = shelves.get(&node).cloned();
        let peers = peers.clone();
        asked.spawn(boxed(
            async move { (ask_one(&peers, &node, known).await, node) },
        ));
    }
    let mut answered = BTreeSet::new();
    while let Some(done) = asked.join_next().await {
        match done {
            Ok((Ok(shelf), node)) => {
                if let Some(shelf) = shelf {
                    shelves.insert(node.clone(), shelf);
                }
                answered.insert(node);
            }
            Ok((Err(why @ PeerError::Malformed { .. }), node)) => {
                tracing::warn!(%node, why = %model::chain(&why), "cannot list the templates of another node: they are not copied here");
            }
            Ok((Err(why), node)) => {
                tracing::debug!(%node, why = %model::chain(&why), "cannot list the templates of another node");
            }
            Err(why) => {
                tracing::error!(%why, "the task that lists another node's templates failed")
            }
        }
    }
    let view = peers.cluster().view();
    shelves.retain(|node, _| view.members.contains_key(node));
    answered
}

/// Requests the templates of a node, page by page. Returns `None` if they have not changed.
async fn ask_one(
    peers: &Peers,
    node: &NodeId,
    known: Option<Shelf>,
) -> Result<Option<Shelf>, PeerError> {
    let refused = |why: String| PeerError::Malformed {
        node: node.clone(),
        why,
    };
    let known = blocking(move || Ok(known.map(|shelf| shelf.sum()))).await;
    let mut asked = Asked {
        known: known.ok().flatten().unwrap_or_default(),
        is_paged: true,
        after: None,
    };
    let mut pages = Pages::default();
    loop {
        let body = serde_json::to_vec(&asked).map_err(|why| refused(why.to_string()))?;
        let question = question("POST", "/cluster/templates", body);
        let Some(page) = peers.ask::<Option<Page>>(node, question).await? else {
            return Ok(None);
        };
        match pages.add(page).map_err(refused)? {
            Some(next) => asked = next,
            None => return Ok(Some(pages.shelf())),
        }
    }
}

/// Applies the changes of other nodes except copies, and returns the plan.
async fn act(
    peers: &Peers,
    parts: &Parts,
    shelves: &BTreeMap<NodeId, Shelf>,
    answered: &BTreeSet<NodeId>,
) -> Plan {
    let templates = peers.templates();
    for shelf in shelves.values() {
        let merged = templates.merge(peers.dir(), shelf.deleted.clone()).await;
        warn(merged, "cannot store deletions of templates");
    }
    let view = peers.cluster().view();
    let seen = shelves.iter().filter(|(node, _)| answered.contains(*node));
    let deleted = templates.deleted().clone();
    let scene = Scene {
        this: peers.this(),
        own: &parts.builds.catalog().templates,
        shelves: seen.collect(),
        members: view.members.keys().collect(),
        deleted: &deleted,
    };
    let plan = plan::plan(&scene);
    for id in &plan.remove {
        tracing::info!(template = id, "a template was deleted on another node");
        let removed = parts.builds.remove(id.clone()).await;
        warn(removed, "cannot remove a deleted template");
    }
    for (record, home) in &plan.follow {
        let copied = Copied {
            record: record.clone(),
            home: home.clone(),
            made: None,
        };
        let followed = parts.builds.follow(copied).await;
        warn(followed, "cannot follow a template of another node");
    }
    for (id, home) in &plan.take_over {
        tracing::warn!(
            template = id,
            "this node is now the home of a template: its previous home has left"
        );
        let taken = parts.builds.take_over(id.clone(), home.clone()).await;
        warn(taken, "cannot take over a template");
    }
    for id in plan.shadowed.difference(&templates.shadowed()) {
        tracing::warn!(
            template = id,
            "another node has an older template of this name: creates by name use that one"
        );
    }
    *templates.shadowed() = plan.shadowed.clone();
    let missing = u64::try_from(plan.missing.len()).unwrap_or(u64::MAX);
    let counters = templates.counters();
    counters.missing.store(missing, Ordering::Relaxed);
    plan
}

fn warn(done: Result<(), BuildsError>, what: &str) {
    if let Err(why) = done {
        tracing::warn!(why = %model::chain(&why), "{what}");
    }
}

/// Whether this node accepts new templates.
fn is_open(peers: &Peers, parts: &Parts) -> bool {
    parts.node.chosen().status == NodeStatus::Ready
        && peers.cluster().view().state(peers.this()) == NodeState::Ready
}

/// The newest build to copy from a node of the same platform.
fn next<'a>(
    peers: &Peers,
    missing: &'a [Missing],
    failed: &BTreeMap<String, Failed>,
) -> Option<&'a Missing> {
    let view = peers.cluster().view();
    let platform = |node: &NodeId| view.nodes.get(node).map(|node| node.platform);
    let own = platform(peers.this());
    let now = Instant::now();
    missing.iter().find(|missing| {
        let waits = failed.get(&missing.build);
        let waits = waits.is_some_and(|failed| failed.not_before > now);
        !waits && own.is_some() && platform(&missing.source) == own
    })
}

/// Counts a finished copy. Delays the next attempt of one that failed.
fn note(
    peers: &Peers,
    failed: &mut BTreeMap<String, Failed>,
    outcome: Result<u64, TakeError>,
    missing: &Missing,
) {
    let counters = peers.templates().counters();
    let (node, build) = (&missing.source, &missing.build);
    let template = &missing.record.name;
    match outcome {
        Ok(bytes) => {
            counters.copied.fetch_add(1, Ordering::Relaxed);
            counters.bytes.fetch_add(bytes, Ordering::Relaxed);
            tracing::info!(template, build, %node, bytes, "copied a template from another node");
        }
        Err(why) => {
            counters.failed.fetch_add(1, Ordering::Relaxed);
            let entry = failed.entry(build.clone()).or_insert(Failed {
                times: 0,
                not_before: Instant::now(),
            });
            let delay = AGAIN.saturating_mul(1 << entry.times.min(7));
            let most = if why.is_away() {
                AGAIN_AWAY
            } else {
                AGAIN_MOST
            };
            let delay = delay.min(most);
            entry.times += 1;
            entry.not_before = Instant::now() + delay;
            let again_s = delay.as_secs();
            tracing::warn!(template, build, %node, again_s, why = %model::chain(&why), "cannot copy a template from another node");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn deletions_at_the_same_time_are_all_kept() {
        let state = tempfile::tempdir().unwrap();
        let dir = Dir::of(state.path());
        dir.create().unwrap();
        let templates = Templates::new(&dir);
        let mut deletions = JoinSet::new();
        for number in 0..8 {
            let (templates, dir) = (templates.clone(), dir.clone());
            deletions
                .spawn(async move { templates.delete(&dir, &format!("template{number}")).await });
        }
        for done in deletions.join_all().await {
            done.unwrap();
        }
        let stored = Deleted::load(&dir.path(DELETED));
        assert!((0..8).all(|number| stored.has(&format!("template{number}"))));
    }
}
