//! A power loss at any moment: the system calls of a real server are recorded while it pauses, resumes, snapshots and
//! kills, and the recovery runs on each state in which a crash can leave its state directory (see the crate
//! `power-loss`). This is repeated with syncs left out, which must be detected.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use model::template_file;
use pool::{OnClose, PauseMode, Pool, PoolConfig, SandboxState, TemplateKind};
use power_loss::{Crash, Recording, TRACED, Tree};

use super::{
    lifecycle::run,
    support::{MARKS, SERVER, State, config, names, resume, spec, until, variable},
};

/// Syncs that no state of this test needs, each with a reason.
const NOT_NEEDED: [&str; 0] = [];
/// Leaves out a sync of each kind, not only of the first [`FEW`].
const ALL: &str = "CUBE_TEST_POWER_LOSS_ALL";
const FEW: usize = 4;
const NAME: &str = "mine";
/// The VMM of the recorded server.
const SMALL_VMM: &str = "CUBE_TEST_SMALL_VMM";
/// The directory of installed templates, next to the small VMMs.
const INSTALLED: &str = "installed";

pub(crate) fn kvm_a_power_loss_leaves_what_was_answered() {
    let dir = State::new();
    let (marks, trace) = (dir.0.join("marks"), dir.0.join("trace"));
    // On a different file system than the templates, like the replays: the pool then links no files of templates, which
    // are not in the recording.
    let state = State(PathBuf::from(format!("/dev/shm/cs{}", std::process::id())));
    let vmms = [
        small_vmm(&dir.0, "release-1"),
        small_vmm(&dir.0, "release-2"),
    ];
    template_without_maker(&dir.0.join(INSTALLED).join("base"));
    let status = Command::new("strace")
        .args(TRACED)
        .arg("-o")
        .arg(&trace)
        .arg(std::env::current_exe().expect("this program"))
        .env(SERVER, &state.0)
        .env(MARKS, &marks)
        .env(SMALL_VMM, &vmms[0])
        .status()
        .expect("strace: apt-get install strace");
    assert!(status.success(), "the recorded server: {status}");
    let text = fs::read_to_string(&trace).expect("a trace");
    let recording = Recording::new(&text, &state.0, &marks).expect("a readable trace");
    let replays = State(PathBuf::from(format!("/dev/shm/cp{}", std::process::id())));
    run(async {
        let mut check = Check::new(&recording, replays.0.clone(), vmms);
        let crashes = recording.crashes();
        println!(
            "{} states of {} crashes",
            crashes.len(),
            recording.marks(usize::MAX).len()
        );
        for crash in &crashes {
            if let Err(why) = check.verdict(&recording, crash).await {
                panic!(
                    "after {:?}: {why}\n{}",
                    recording.marks(crash.at),
                    crash.tree
                );
            }
        }
        println!("{} different states", check.seen.len());
        check.every_sync_is_needed(&recording).await;
    });
}

/// Makes a small program that starts the real VMM, because each replay copies its VMM and hashes the copy. Programs
/// with different words count as different VMMs.
fn small_vmm(dir: &Path, word: &str) -> PathBuf {
    let (path, real) = (dir.join(word), variable("CUBE_BIN").join("cube-vmm"));
    let script = format!("#!/bin/sh\n# {word}\nexec {} \"$@\"\n", real.display());
    fs::write(&path, script).expect("a program");
    path
}

/// The template `base` without its maker, so that the small VMM starts it: strace does not record a write as long as
/// the maker, which the pool would copy. It has no recipe either, because each of the many servers would begin to
/// rebuild it.
fn template_without_maker(dir: &Path) {
    let made = variable("CUBE_ARTIFACTS").join("templates/base");
    fs::create_dir_all(dir).expect("a directory");
    for name in names(&made) {
        let left_out = [template_file::MADE_BY, "cube-vmm", template::RECIPE_NAME];
        if !left_out.contains(&name.as_str()) {
            std::os::unix::fs::symlink(made.join(&name), dir.join(&name)).expect("a link");
        }
    }
}

/// Runs the recorded server.
pub(crate) fn be_recorded(state: &Path, marks: &Path) {
    let mut marks = File::create(marks).expect("a file");
    let mut mark = |text: String| {
        marks
            .write_all(format!("{text}\n").as_bytes())
            .expect("a mark")
    };
    fs::create_dir(state).expect("a state directory");
    mark("checkpoint".into());
    run(async {
        let state = State(state.to_owned());
        let vmm = variable(SMALL_VMM);
        let config = PoolConfig {
            installed_templates: Some(vmm.with_file_name(INSTALLED)),
            vmm,
            ..config(&state.0, 0)
        };
        let (pool, ..) = Pool::open(config).await.expect("a pool");
        let memory = PauseMode::Memory;

        // Paused, resumed, paused again, killed.
        let a = pool.create(spec()).await.expect("a sandbox").id;
        mark(format!("created {a}"));
        mark(format!("pausing {a}"));
        pool.pause(&a, memory).await.expect("a pause");
        mark(format!("paused {a}"));
        mark(format!("resuming {a}"));
        resume(&pool, &a).await.expect("a resume");
        mark(format!("resumed {a}"));
        pool.set_timeout(&a, pool::TimeoutChange::Replace, 1000)
            .await
            .expect("a deadline");
        until("the files of the pause are removed", async || {
            (!state
                .0
                .join("sandboxes")
                .join(a.as_str())
                .join("pause")
                .exists())
            .then_some(())
        })
        .await;
        // Written after the job that removed the pause.
        pool.set_timeout(&a, pool::TimeoutChange::Replace, 2000)
            .await
            .expect("a deadline");
        mark(format!("running {a}"));
        mark(format!("pausing {a}"));
        pool.pause(&a, memory).await.expect("a pause");
        mark(format!("paused {a}"));
        mark(format!("killing {a}"));
        pool.kill(&a).await.expect("a kill");
        mark(format!("killed {a}"));
        mark("checkpoint".into());

        // Killed while it runs, right after a resume.
        let b = pool.create(spec()).await.expect("a sandbox").id;
        mark(format!("created {b}"));
        mark(format!("pausing {b}"));
        pool.pause(&b, PauseMode::FilesystemOnly)
            .await
            .expect("a pause");
        mark(format!("paused {b}"));
        mark(format!("resuming {b}"));
        resume(&pool, &b).await.expect("a resume");
        mark(format!("resumed {b}"));
        mark(format!("killing {b}"));
        pool.kill(&b).await.expect("a kill");
        mark(format!("killed {b}"));
        mark("checkpoint".into());

        // Templates of a running and of a paused sandbox, with one name.
        let c = pool.create(spec()).await.expect("a sandbox").id;
        mark(format!("created {c}"));
        mark("snapshotting".into());
        let first = pool
            .snapshot(&c, vec![NAME.into()])
            .await
            .expect("a snapshot")
            .id;
        mark(format!("snapshot {first}"));
        mark(format!("pausing {c}"));
        pool.pause(&c, memory).await.expect("a pause");
        mark(format!("paused {c}"));
        mark("snapshotting".into());
        let second = pool
            .snapshot(&c, vec![NAME.into()])
            .await
            .expect("a snapshot")
            .id;
        mark(format!("snapshot {second}"));
        mark(format!("removing {first}"));
        pool.remove_template(&first).await.expect("a removal");
        mark(format!("removed {first}"));
        pool.close(OnClose::Keep).await;
        std::mem::forget(state);
    });
}

/// The result of a recovery.
#[derive(Clone, Debug, Default)]
struct Found {
    /// Ids of paused sandboxes, and the files of their pauses.
    paused: BTreeMap<String, Files>,
    lost: BTreeSet<String>,
    /// Ids of the templates below the state directory, their names and files.
    templates: BTreeMap<String, (Vec<String>, Files)>,
    /// Directories of templates, including unused ones.
    left: BTreeSet<String>,
    /// Ids of the sandboxes whose directory was moved aside.
    damaged: BTreeSet<String>,
    /// The kept VMMs.
    vmms: BTreeSet<Vec<u8>>,
}

/// Names and contents, without records.
type Files = BTreeMap<String, Vec<u8>>;

fn files(dir: &Path) -> Files {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|e| (e.file_name().to_string_lossy().into_owned(), e.path()))
        .filter(|(name, _)| name != "record.json")
        .map(|(name, path)| (name, fs::read(path).expect("a file")))
        .collect()
}

struct Check {
    replays: PathBuf,
    /// The VMM of the recorded server, and the VMM of the recovering server, which has a later release.
    vmms: [PathBuf; 2],
    /// The result of the recovery for each state, or the reason why the pool did not open.
    seen: BTreeMap<Tree, Result<Found, String>>,
    /// The complete files of each pause and template, at the time of the response.
    whole: Vec<Files>,
}

impl Check {
    fn new(recording: &Recording, replays: PathBuf, vmms: [PathBuf; 2]) -> Self {
        fs::create_dir_all(&replays).expect("a directory");
        let mut whole = Vec::new();
        let mut answered = 0;
        for crash in recording.crashes() {
            let marks = recording.marks(crash.at);
            let word = |mark: &&str| mark.split(' ').next().map(str::to_owned);
            let last = marks.last().and_then(word).unwrap_or_default();
            let id = marks
                .last()
                .and_then(|m| m.split(' ').nth(1))
                .unwrap_or_default();
            let dir = match last.as_str() {
                "paused" => Path::new("sandboxes").join(id).join("pause"),
                "snapshot" => Path::new("templates").join(id).join("image"),
                _ => continue,
            };
            if marks.len() > answered {
                answered = marks.len();
                whole.push(crash.tree.files(&dir));
            }
        }
        for files in &mut whole {
            files.remove("record.json");
            assert!(
                !files.is_empty(),
                "an answered pause or snapshot without files"
            );
        }
        Self {
            replays,
            vmms,
            seen: BTreeMap::new(),
            whole,
        }
    }

    async fn found(&mut self, tree: &Tree) -> Result<Found, String> {
        if let Some(found) = self.seen.get(tree) {
            return found.clone();
        }
        let state = self.replays.join(self.seen.len().to_string());
        fs::create_dir(&state).expect("a directory");
        let found = recover(&state, tree, &self.vmms[1]).await;
        fs::remove_dir_all(&state).expect("the replay is removed");
        self.seen.insert(tree.clone(), found.clone());
        found
    }

    /// Checks that the recovery keeps each promise made before the crash.
    async fn verdict(&mut self, recording: &Recording, crash: &Crash) -> Result<(), String> {
        let found = self.found(&crash.tree).await?;
        let marks = recording.marks(crash.at);
        self.sandboxes(&marks, &found)?;
        self.templates(&marks, &found)?;
        self.release(crash, &found)
    }

    /// Checks that the VMM that wrote the recovered files is complete, and that older servers are refused.
    fn release(&self, crash: &Crash, found: &Found) -> Result<(), String> {
        let former = fs::read(&self.vmms[0]).expect("a VMM");
        if !found.paused.is_empty() || !found.templates.is_empty() {
            if !found.vmms.contains(&former) {
                return Err("the VMM of a pause or snapshot is lost".into());
            }
            let version = crash.tree.file(Path::new("version.json"));
            let version = version.map(serde_json::from_slice::<serde_json::Value>);
            if !matches!(version, Some(Ok(_))) {
                return Err("the version of the state directory is lost".into());
            }
        }
        Ok(())
    }

    fn sandboxes(&self, marks: &[&str], found: &Found) -> Result<(), String> {
        let mut phases = BTreeMap::new();
        for mark in marks {
            if let Some((phase, id)) = mark.split_once(' ') {
                phases.insert(id, phase);
            }
        }
        for (id, files) in &found.paused {
            if !self.whole.contains(files) {
                return Err(format!("{id} is paused with incomplete files"));
            }
        }
        for (id, phase) in phases {
            // The previous record is not synced, so it may be torn after a crash during a pause.
            let may_be_damaged = matches!(phase, "pausing" | "resumed");
            if found.damaged.contains(id) && !(may_be_damaged && found.lost.contains(id)) {
                return Err(format!("{phase} {id}: moved aside"));
            }
            let (paused, lost) = (found.paused.contains_key(id), found.lost.contains(id));
            let kept = match phase {
                "paused" => paused,
                "pausing" => true,
                "resuming" | "resumed" => paused || lost,
                // Reported, unless not even its directory is on disk.
                "created" => !paused,
                "running" => !paused && lost,
                // A running sandbox may be reported as lost.
                "killing" => true,
                "killed" => !paused,
                _ => continue,
            };
            if !kept {
                return Err(format!("{phase} {id}: paused {paused}, lost {lost}"));
            }
        }
        Ok(())
    }

    fn templates(&self, marks: &[&str], found: &Found) -> Result<(), String> {
        let mut made: Vec<&str> = Vec::new();
        let mut removed = Vec::new();
        let mut removing = Vec::new();
        for mark in marks {
            match mark.split_once(' ') {
                Some(("snapshot", id)) => made.push(id),
                Some(("removing", id)) => removing.push(id),
                Some(("removed", id)) => removed.push(id),
                _ => {}
            }
        }
        if let Some(id) = found
            .left
            .iter()
            .find(|id| !found.templates.contains_key(*id))
        {
            return Err(format!("template {id} is neither used nor removed"));
        }
        for (id, (names, files)) in &found.templates {
            if !self.whole.contains(files) {
                return Err(format!("template {id} is incomplete"));
            }
            if removed.contains(&id.as_str()) {
                return Err(format!("template {id} was removed"));
            }
            let is_new = !made.contains(&id.as_str());
            let is_last = made.last() == Some(&id.as_str());
            if !names.is_empty() && !is_new && !is_last {
                return Err(format!(
                    "template {id} has lost its names, and has {names:?}"
                ));
            }
        }
        for id in &made {
            if !removing.contains(id) && !found.templates.contains_key(*id) {
                return Err(format!("there is no template {id}"));
            }
        }
        let owners = found
            .templates
            .values()
            .filter(|(names, _)| names == &[NAME])
            .count();
        if owners != usize::from(!made.is_empty()) && !(made.is_empty() && owners == 1) {
            return Err(format!("{owners} templates have the name"));
        }
        Ok(())
    }

    /// Leaves out each kind of sync in turn, and requires that a promise is broken.
    async fn every_sync_is_needed(&mut self, recording: &Recording) {
        let mut kinds = BTreeMap::new();
        for (number, path) in recording.syncs() {
            let marks = recording.marks(number);
            let doing = marks.last().and_then(|mark| mark.split(' ').next());
            let kind = format!("{}: {}", doing.unwrap_or_default(), kind_of(path));
            kinds.entry(kind).or_insert(number);
        }
        let tried = match std::env::var_os(ALL) {
            Some(_) => kinds.len(),
            None => FEW,
        };
        let mut unnoticed = Vec::new();
        for (kind, number) in kinds.into_iter().take(tried) {
            let less = recording.without(number);
            let mut broken = None;
            for crash in less.crashes() {
                if let Err(why) = self.verdict(&less, &crash).await {
                    broken = Some(why);
                    break;
                }
            }
            println!(
                "without {kind}: {}",
                broken.as_deref().unwrap_or("nothing is noticed")
            );
            if broken.is_none() && !NOT_NEEDED.contains(&kind.as_str()) {
                unnoticed.push(kind);
            }
        }
        assert!(
            unnoticed.is_empty(),
            "superfluous, or not tested: {unnoticed:#?}"
        );
    }
}

/// A path with ids replaced.
fn kind_of(path: &Path) -> String {
    let mut words: Vec<_> = path
        .iter()
        .map(|w| w.to_string_lossy().into_owned())
        .collect();
    if let Some(id) = words.get_mut(1) {
        *id = "ID".into();
    }
    if words.is_empty() {
        return "the state directory".into();
    }
    words.join("/")
}

/// Opens a pool on a state, as a server does after a reboot.
async fn recover(state: &Path, tree: &Tree, vmm: &Path) -> Result<Found, String> {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot id");
    let boot_id = boot_id.trim();
    let other = boot_id.replace(|c: char| c != '-', "0");
    tree.write(state, |_, bytes| match std::str::from_utf8(bytes) {
        Ok(text) => text.replace(boot_id, &other).into_bytes(),
        Err(_) => bytes.to_vec(),
    })
    .expect("a state directory");
    let config = PoolConfig {
        installed_templates: Some(vmm.with_file_name(INSTALLED)),
        vmm: vmm.to_owned(),
        ..config(state, 0)
    };
    let opened = Pool::open(config).await.map_err(|e| e.to_string());
    let (pool, recovered, _ended) = opened?;
    let vmms = names(&state.join("vmms")).into_iter();
    let vmms = vmms.map(|id| state.join("vmms").join(id).join("cube-vmm"));
    let mut found = Found {
        vmms: vmms.filter_map(|path| fs::read(path).ok()).collect(),
        left: names(&state.join("templates")).into_iter().collect(),
        damaged: names(&state.join("damaged")).into_iter().collect(),
        ..Found::default()
    };
    for sandbox in pool.list().await.expect("a list") {
        let id = sandbox.id.to_string();
        assert_ne!(sandbox.state, SandboxState::Running, "{id} after a reboot");
        let pause = state.join("sandboxes").join(&id).join("pause");
        found.paused.insert(id, files(&pause));
    }
    found.lost = recovered
        .lost
        .iter()
        .map(|(id, _)| id.to_string())
        .collect();
    for template in pool
        .templates()
        .await
        .into_iter()
        .filter(|t| t.kind == TemplateKind::Snapshot)
    {
        let image = state.join("templates").join(&template.id).join("image");
        let entry = (template.names, files(&image));
        found.templates.insert(template.id, entry);
    }
    pool.close(OnClose::Keep).await;
    Ok(found)
}
