mod follow;
mod redo;
mod seen;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use cluster::Tagged;
use model::Bytes;
use pool::{TemplateInfo, TemplateKind};
use tokio::sync::Notify;

use super::{running::MAX_QUEUED, task::MAX_OPEN, *};
use crate::{
    cancel::Cancel,
    catalog::Resolved,
    plan::At,
    record::{BuildState, RESTARTED, Reason, SUPERSEDED, TemplateRecord},
    request,
    run::{Built, Failure, Order},
};

/// A pool in memory. A build runs until the test ends it or it is cancelled.
#[derive(Clone, Debug, Default)]
struct Fake(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    templates: BTreeMap<String, TemplateInfo>,
    in_use: BTreeSet<String>,
    /// Templates of the started builds in order, and their outcomes.
    begun: Vec<String>,
    orders: Vec<Order>,
    panics: bool,
    ends: HashMap<String, Result<Built, Failure>>,
    refuses_names: bool,
    /// References that only other nodes have.
    lacked: BTreeSet<String>,
    /// The builds of the announced tags by template. `None`: deleted.
    announced: BTreeMap<String, Option<BTreeMap<String, String>>>,
    /// Changes of tags are not seen by the other nodes.
    is_unseen: bool,
}

pub(crate) fn info(id: &str, kind: TemplateKind, names: &[&str]) -> TemplateInfo {
    TemplateInfo {
        id: id.to_owned(),
        names: names.iter().map(|n| (*n).to_owned()).collect(),
        memory: Bytes::mib(512),
        vcpus: 1,
        disk: Bytes::mib(64),
        created_unix_s: 1,
        kind,
        source: None,
        spawned: 0,
        warm: 0,
        vmm: None,
        bytes: Bytes(0),
    }
}

impl Fake {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = act(&mut state);
        self.0.changed.notify_waiters();
        result
    }

    fn add(&self, id: &str, kind: TemplateKind, names: &[&str]) {
        self.with(|s| s.templates.insert(id.to_owned(), info(id, kind, names)));
    }

    fn names(&self, id: &str) -> Option<Vec<String>> {
        self.with(|s| s.templates.get(id).map(|t| t.names.clone()))
    }

    /// Ends the build of a template with a new template in the pool.
    fn succeed(&self, template: &str, pool_id: &str) {
        self.add(pool_id, TemplateKind::Built, &[]);
        let built = Built {
            template: pool_id.to_owned(),
            held: None,
        };
        self.with(|s| s.ends.insert(template.to_owned(), Ok(built)));
    }
}

impl Machinery for Fake {
    async fn run(
        &self,
        order: &Order,
        _files: &Uploads,
        log: &BuildLog,
        mut cancel: Cancel,
    ) -> Result<Built, Failure> {
        log.push(rest::LogLevel::Info, At::Base, "begun");
        self.with(|s| {
            s.begun.push(order.template_id.clone());
            s.orders.push(order.clone());
        });
        assert!(!self.with_quiet(|s| s.panics), "a bug of the executor");
        loop {
            let changed = self.0.changed.notified();
            if let Some(end) = self.with_quiet(|s| s.ends.remove(&order.template_id)) {
                return end;
            }
            tokio::select! {
                () = changed => {}
                () = cancel.cancelled() => return Err(Failure { at: At::Base, message: "cancelled".to_owned() }),
            }
        }
    }

    async fn templates(&self) -> Vec<TemplateInfo> {
        self.with(|s| s.templates.values().cloned().collect())
    }

    async fn name(&self, id: &str, names: Vec<String>) -> Result<(), PoolError> {
        self.with(|s| {
            if s.refuses_names || !s.templates.contains_key(id) {
                return Err(PoolError::NoTemplate(id.to_owned()));
            }
            for template in s.templates.values_mut() {
                template.names.retain(|n| !names.contains(n));
            }
            s.templates.get_mut(id).unwrap().names.extend(names);
            Ok(())
        })
    }

    async fn unname(&self, name: &str) -> Result<(), PoolError> {
        self.with(|s| {
            for template in s.templates.values_mut() {
                template.names.retain(|n| n != name);
            }
        });
        Ok(())
    }

    async fn remove(&self, id: &str) -> Result<(), PoolError> {
        self.with(|s| {
            if s.in_use.contains(id) {
                return Err(PoolError::InUse(id.to_owned(), "a sandbox".to_owned()));
            }
            s.templates.remove(id);
            Ok(())
        })
    }

    async fn lacks(&self, reference: &str, _tagged: Option<&Tagged>) -> bool {
        self.with_quiet(|s| s.lacked.contains(reference))
    }

    async fn announce(&self, before: &TemplateRecord, after: Option<&TemplateRecord>) {
        let tags = after.map(builds_of);
        let is_new = tags.is_some() && tags != Some(builds_of(before));
        self.with_quiet(|s| s.announced.insert(before.id.clone(), tags));
        loop {
            let changed = self.0.changed.notified();
            if !is_new || !self.with_quiet(|s| s.is_unseen) {
                return;
            }
            changed.await;
        }
    }
}

fn builds_of(record: &TemplateRecord) -> BTreeMap<String, String> {
    let tags = record.tags.iter();
    tags.map(|(tag, named)| (tag.clone(), named.build.clone()))
        .collect()
}

impl Fake {
    /// Does not wake builds, which call this.
    fn with_quiet<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A server's lifetime. The state directory and the pool outlive it.
struct World {
    dir: tempfile::TempDir,
    pool: Fake,
    builds: Builds,
    tasks: JoinSet<()>,
}

impl World {
    fn new() -> Self {
        let (dir, pool) = (tempfile::tempdir().unwrap(), Fake::default());
        let mut tasks = JoinSet::new();
        let builds = open(dir.path(), &pool, &mut tasks);
        Self {
            dir,
            pool,
            builds,
            tasks,
        }
    }

    /// Kills the owner in whatever state it is, and starts another.
    async fn restart(&mut self) {
        self.tasks.shutdown().await;
        self.builds = open(self.dir.path(), &self.pool, &mut self.tasks);
    }

    async fn request(&self, name: &str) -> Requested {
        self.try_request(name).await.unwrap()
    }

    async fn try_request(&self, name: &str) -> Result<Requested, BuildsError> {
        let request = rest::NewBuild {
            name: Some(name.to_owned()),
            ..Default::default()
        };
        self.builds
            .create(request::check_new(request).unwrap())
            .await
    }

    async fn start(&self, build: &Requested) -> Result<(), BuildsError> {
        self.start_with(build, Default::default()).await
    }

    async fn start_with(
        &self,
        build: &Requested,
        request: rest::StartBuild,
    ) -> Result<(), BuildsError> {
        let request = rest::StartBuild {
            from_image: Some("debian".to_owned()),
            ..request
        };
        let spec = request::check_start(request).unwrap();
        self.builds.start(build.clone(), spec).await
    }

    fn state(&self, build: &Requested) -> Option<BuildState> {
        let catalog = self.builds.catalog();
        let template = catalog.templates.get(&build.template_id)?;
        Some(template.build(&build.build_id)?.state.clone())
    }

    async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let wait = async {
            while !holds(self) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let limit = Duration::from_secs(20);
        assert!(tokio::time::timeout(limit, wait).await.is_ok(), "{what}");
    }

    async fn ended(&self, build: &Requested) -> BuildState {
        let is_over = |w: &Self| w.state(build).is_some_and(|state| state.is_final());
        self.until("the build does not end", is_over).await;
        self.state(build).unwrap()
    }

    async fn built(&self, name: &str, pool_id: &str) -> Requested {
        let build = self.request(name).await;
        self.start(&build).await.unwrap();
        self.pool.succeed(&build.template_id, pool_id);
        let state = self.ended(&build).await;
        assert!(matches!(state, BuildState::Ready { .. }), "{state:?}");
        build
    }
}

fn open(dir: &std::path::Path, pool: &Fake, tasks: &mut JoinSet<()>) -> Builds {
    let opened = Store::open(dir.join("builds")).unwrap();
    let uploads = Uploads::open(opened.0.files(), 0, 1 << 30).unwrap();
    let key = opened.0.upload_key().unwrap();
    Builds::open(
        opened,
        uploads,
        Authority::new(&key),
        pool.clone(),
        1,
        tasks,
    )
}

fn failed(message: &str) -> BuildState {
    BuildState::Failed(Reason::new(message))
}

#[tokio::test]
async fn a_build_gets_its_names_and_the_former_template_is_removed() {
    let world = World::new();
    let first = world.built("n", "p1").await;
    assert_eq!(world.pool.names("p1").unwrap(), ["n"]);
    let tags = |tags: &[&str]| tags.iter().map(|t| (*t).to_owned()).collect();
    let id = first.template_id.clone();
    let assigned = world
        .builds
        .assign(id.clone(), "default".into(), tags(&["v1"]))
        .await;
    assert_eq!(assigned.unwrap(), first.build_id);
    let second = world.built("n", "p2").await;
    assert_eq!(second.template_id, first.template_id);
    assert_eq!(world.pool.names("p2").unwrap(), ["n"]);
    assert_eq!(world.pool.names("p1").unwrap(), ["n:v1"]);
    let catalog = world.builds.catalog();
    assert_eq!(catalog.resolve("n"), Resolved::Ready("p2".into()));
    assert_eq!(
        catalog.resolve(&format!("{id}:v1")),
        Resolved::Ready("p1".into())
    );
    assert_eq!(catalog.resolve("n:v2"), Resolved::NotReady);
    assert_eq!(catalog.resolve("other"), Resolved::Foreign);
    world
        .builds
        .unassign(id.clone(), tags(&["v1"]))
        .await
        .unwrap();
    assert_eq!(world.pool.names("p1"), None);
    world.pool.with(|s| s.in_use.insert("p2".into()));
    world.builds.remove(id).await.unwrap();
    assert_eq!(
        world.pool.names("p2").unwrap(),
        [""; 0],
        "it is in use, without a name"
    );
    assert!(matches!(
        world.start(&second).await,
        Err(BuildsError::NoTemplate(_))
    ));
}

#[tokio::test]
async fn a_newer_build_supersedes_running_and_queued_ones() {
    let world = World::new();
    let blocker = world.request("blocker").await;
    world.start(&blocker).await.unwrap();
    let queued = world.request("n").await;
    world.start(&queued).await.unwrap();
    let newer = world.request("n").await;
    assert_eq!(world.state(&queued), Some(BuildState::Started));
    world.start(&newer).await.unwrap();
    assert_eq!(world.ended(&queued).await, failed(SUPERSEDED));
    let again = world.request("blocker").await;
    world.start(&again).await.unwrap();
    assert_eq!(world.ended(&blocker).await, failed(SUPERSEDED));
    assert!(matches!(
        world.start(&blocker).await,
        Err(BuildsError::NotWaiting)
    ));
}

#[tokio::test]
async fn builds_of_one_key_queue_behind_those_of_others() {
    let world = World::new();
    let mut builds = Vec::new();
    for (name, owner) in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")] {
        let build = world.request(name).await;
        let request = rest::StartBuild {
            from_image: Some("debian".to_owned()),
            ..Default::default()
        };
        let mut spec = request::check_start(request).unwrap();
        spec.owner = Some(owner.to_owned());
        world.builds.start(build.clone(), spec).await.unwrap();
        builds.push(build.template_id);
    }
    for (number, expected) in [0, 3, 1, 2].into_iter().enumerate() {
        let begun = |w: &World| w.pool.with_quiet(|s| s.begun.clone());
        world
            .until("the next one begins", |w| begun(w).len() == number + 1)
            .await;
        assert_eq!(begun(&world)[number], builds[expected]);
        world.pool.succeed(&builds[expected], &format!("p{number}"));
    }
}

#[tokio::test]
async fn the_queue_is_bounded() {
    let world = World::new();
    let mut builds = Vec::new();
    for number in 0..=MAX_QUEUED + 1 {
        builds.push(world.request(&format!("n{number}")).await);
    }
    let (last, others) = builds.split_last().unwrap();
    for build in others {
        world.start(build).await.unwrap();
    }
    assert!(matches!(
        world.start(last).await,
        Err(BuildsError::TooMany(_))
    ));
    assert_eq!(world.state(last), Some(BuildState::Waiting));
    for number in builds.len()..MAX_OPEN {
        world.request(&format!("n{number}")).await;
    }
    assert!(matches!(
        world.try_request("one-more").await,
        Err(BuildsError::TooMany(_))
    ));
}

#[tokio::test]
async fn a_deleted_template_ends_its_build_and_leaves_nothing() {
    let world = World::new();
    let build = world.request("n").await;
    world.start(&build).await.unwrap();
    world
        .until("it begins", |w| w.pool.with_quiet(|s| !s.begun.is_empty()))
        .await;
    world
        .builds
        .remove(build.template_id.clone())
        .await
        .unwrap();
    assert_eq!(world.state(&build), None);
    let next = world.built("n", "p2").await;
    assert_ne!(next.template_id, build.template_id);
    world.restart_finds(&["n"]).await;
}

impl World {
    async fn restart_finds(mut self, names: &[&str]) {
        self.restart().await;
        let catalog = self.builds.catalog();
        let found: Vec<_> = catalog
            .templates
            .values()
            .map(|t| t.name.as_str())
            .collect();
        assert_eq!(found, names);
    }
}

#[tokio::test]
async fn after_a_kill_started_builds_have_failed_and_waiting_ones_can_start() {
    let mut world = World::new();
    let (running, waiting) = (world.request("n").await, world.request("m").await);
    world.start(&running).await.unwrap();
    world.restart().await;
    assert_eq!(world.ended(&running).await, failed(RESTARTED));
    world.start(&waiting).await.unwrap();
    world.pool.succeed(&waiting.template_id, "p");
    assert!(matches!(
        world.ended(&waiting).await,
        BuildState::Ready { .. }
    ));
}

#[tokio::test]
async fn a_crash_before_the_record_is_written_leaves_the_former_build() {
    let mut world = World::new();
    world.built("n", "p1").await;
    let build = world.request("n").await;
    world.start(&build).await.unwrap();
    // The executor has ended and the pool has the names; the record was not written.
    world.pool.add("p2", TemplateKind::Built, &[]);
    world
        .pool
        .name("p2", vec!["n".into(), "n:v1".into()])
        .await
        .unwrap();
    world.restart().await;
    assert_eq!(world.ended(&build).await, failed(RESTARTED));
    world
        .until("the orphan is removed", |w| w.pool.names("p2").is_none())
        .await;
    assert_eq!(world.pool.names("p1").unwrap(), ["n"]);
}

#[tokio::test]
async fn with_an_unreadable_record_nothing_is_removed_from_the_pool() {
    let mut world = World::new();
    let build = world.built("n", "p1").await;
    let record = world
        .dir
        .path()
        .join("builds/templates")
        .join(&build.template_id);
    std::fs::write(record.join("record.json"), "torn").unwrap();
    world.restart().await;
    world.builds.stop().await;
    assert_eq!(world.pool.names("p1").unwrap(), ["n"]);
}

#[tokio::test]
async fn a_build_whose_names_cannot_be_given_fails_and_leaves_nothing() {
    let world = World::new();
    let build = world.request("n").await;
    world.start(&build).await.unwrap();
    world.pool.with(|s| s.refuses_names = true);
    world.pool.succeed(&build.template_id, "p");
    assert!(matches!(world.ended(&build).await, BuildState::Failed(_)));
    world
        .until("the template is removed", |w| w.pool.names("p").is_none())
        .await;
}

#[tokio::test]
async fn a_stop_ends_all_builds_and_refuses_new_ones() {
    let world = World::new();
    let builds = [
        world.request("a").await,
        world.request("b").await,
        world.request("c").await,
    ];
    world.start(&builds[0]).await.unwrap();
    world.start(&builds[1]).await.unwrap();
    world.builds.stop().await;
    for build in &builds[..2] {
        assert_eq!(world.ended(build).await, failed(RESTARTED));
    }
    assert!(matches!(
        world.start(&builds[2]).await,
        Err(BuildsError::Closed)
    ));
}

#[tokio::test]
async fn names_of_installed_templates_and_snapshots_are_refused() {
    let world = World::new();
    world.pool.add("i", TemplateKind::Installed, &["base"]);
    world.pool.add("s", TemplateKind::Snapshot, &["snap:v1"]);
    for name in ["base", "base:v2"] {
        assert!(matches!(
            world.try_request(name).await,
            Err(BuildsError::Installed(_))
        ));
    }
    for name in ["snap", "s"] {
        assert!(matches!(
            world.try_request(name).await,
            Err(BuildsError::Taken(_))
        ));
    }
}

#[tokio::test]
async fn the_log_of_an_ended_build_is_on_disk() {
    let mut world = World::new();
    let build = world.built("n", "p").await;
    world.restart().await;
    let catalog = world.builds.catalog();
    let log = world.builds.log(&catalog, &build).await.unwrap();
    assert_eq!(log.read(<[_]>::len), 1);
}

#[tokio::test]
async fn a_panic_ends_its_build_only_and_frees_its_place() {
    let world = World::new();
    world.pool.with(|s| s.panics = true);
    let lost = world.request("lost").await;
    world.start(&lost).await.unwrap();
    let BuildState::Failed(reason) = world.ended(&lost).await else {
        panic!("it has not failed");
    };
    assert!(
        reason.message.contains("a bug of the executor"),
        "{reason:?}"
    );
    let catalog = world.builds.catalog();
    let log = world.builds.log(&catalog, &lost).await.unwrap();
    assert_eq!(log.read(<[_]>::len), 1);
    // Only one build runs at a time.
    world.pool.with(|s| s.panics = false);
    world.built("next", "p").await;
    world.builds.stop().await;
}
