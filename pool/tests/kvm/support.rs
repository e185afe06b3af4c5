//! Checks of the host, state directories, and commands in sandboxes.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant, UNIX_EPOCH},
};

use envd::{ENVD_PORT, EnvdClient, ExecOutput, ExecRequest};
use model::{SandboxId, template_file};
use pool::{
    CreateSpec, Init, Lifetime, MissingLimits, Pool, PoolConfig, PoolError, Sandbox, SandboxLimits,
    Wake, WarmMarks,
};

/// Makes this program a server that will be killed. The value is its state directory.
pub(crate) const SERVER: &str = "CUBE_TEST_POOL";
/// Set together with [`SERVER`]: the server performs all operations concurrently.
pub(crate) const BUSY: &str = "CUBE_TEST_POOL_BUSY";
/// Set together with [`SERVER`]: the server has its own disk. The value is the disk's image.
pub(crate) const FULL: &str = "CUBE_TEST_POOL_FULL";
/// Set together with [`SERVER`]: the server writes marks to this file, for the recording of its system calls.
pub(crate) const MARKS: &str = "CUBE_TEST_POOL_MARKS";
/// Set together with [`SERVER`]: the disk of the state directory will fail in this way.
pub(crate) const FAULT: &str = "CUBE_TEST_POOL_FAULT";
/// Set together with [`SERVER`]: the server only opens its pool, with a later release's VMM.
pub(crate) const UPGRADED: &str = "CUBE_TEST_POOL_UPGRADED";
/// Timeout of any single response. It is long, because the host may be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const PREFIX: &str = "cube-pool-";

/// Returns why the tests cannot run on this host; `None` if they can.
pub(crate) fn lack() -> Option<String> {
    test_cases::lack_for_vms(&[
        ("CUBE_ARTIFACTS", "templates/base/manifest.json"),
        ("CUBE_BIN", "cube-vmm"),
    ])
}

pub(crate) fn variable(name: &str) -> PathBuf {
    PathBuf::from(env::var_os(name).unwrap_or_default())
}

/// A state directory, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct State(pub(crate) PathBuf);

impl State {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        // A short path, on a disk.
        let dir = Path::new("/var/tmp").join(format!("{PREFIX}{}-{n}", std::process::id()));
        fs::create_dir_all(&dir).expect("a state directory");
        Self(dir)
    }

    /// Names of the sandboxes' directories.
    pub(crate) fn sandboxes(&self) -> Vec<String> {
        names(&self.0.join("sandboxes"))
    }

    /// Process ids of the VMMs of this state directory.
    pub(crate) fn processes(&self) -> Vec<u32> {
        processes_of(&self.0)
    }

    /// Process ids of the VMMs that rebuild templates.
    pub(crate) fn rebuilds(&self) -> Vec<u32> {
        processes_of(&self.0.join("images"))
    }

    /// Cgroups of the VMs of this state directory's pool.
    pub(crate) fn groups(&self) -> Vec<PathBuf> {
        use std::os::unix::fs::MetadataExt;
        let Ok(meta) = fs::metadata(self.0.join("lock")) else {
            return Vec::new();
        };
        let name = format!("cube-{:x}-{:x}", meta.dev(), meta.ino());
        let mounts = ["memory", "cpu", "pids", "blkio", "unified", "."];
        mounts
            .iter()
            .map(|m| Path::new("/sys/fs/cgroup").join(m).join(&name))
            .filter(|group| group.is_dir())
            .flat_map(|group| {
                names(&group)
                    .into_iter()
                    .map(move |n| group.join(n))
                    .filter(|path| path.is_dir())
            })
            .collect()
    }

    /// Checks that no directory, process or cgroup of a sandbox is left.
    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.sandboxes(), Vec::<String>::new());
        assert_eq!(self.processes(), Vec::<u32>::new());
        assert_eq!(self.groups(), Vec::<PathBuf>::new());
    }
}

impl Drop for State {
    fn drop(&mut self) {
        kill_all(&self.0);
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Finds VMMs by their standard error, a file in their sandbox's directory.
fn processes_of(state: &Path) -> Vec<u32> {
    let pids = names(Path::new("/proc"));
    pids.iter()
        .filter_map(|name| name.parse().ok())
        .filter(|pid: &u32| {
            let log = fs::read_link(format!("/proc/{pid}/fd/2")).unwrap_or_default();
            let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            comm.trim() == "cube-vmm" && log.starts_with(state)
        })
        .collect()
}

fn kill_all(state: &Path) {
    for pid in processes_of(state) {
        kill(pid);
    }
}

/// Sends SIGKILL.
pub(crate) fn kill(pid: u32) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a process id"));
    // The process may have exited.
    let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
}

/// Kills the processes and removes the state directories of earlier test runs.
pub(crate) fn sweep() {
    for name in names(Path::new("/var/tmp")) {
        let pid = name.strip_prefix(PREFIX).and_then(|n| n.split('-').next());
        let pid = pid.and_then(|p| p.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let state = Path::new("/var/tmp").join(name);
            kill_all(&state);
            let _ = fs::remove_dir_all(state);
        }
    }
}

/// The configuration of a small pool with `warm` warm slots.
pub(crate) fn config(state: &Path, warm: u32) -> PoolConfig {
    PoolConfig {
        installed_templates: Some(only_base(state)),
        images: vec![variable("CUBE_ARTIFACTS")],
        warm: WarmMarks {
            low: warm,
            high: warm,
        },
        warm_slots: warm,
        limits: SandboxLimits {
            pids: 16,
            ..SandboxLimits::default()
        },
        missing_limits: MissingLimits::Allow,
        max_sandboxes: 200,
        start_timeout: PATIENCE,
        adopt_timeout: PATIENCE,
        ..PoolConfig::new(variable("CUBE_BIN").join("cube-vmm"), state.to_owned())
    }
}

/// A directory with the template `base` alone: the tests count warm slots over all installed templates.
fn only_base(state: &Path) -> PathBuf {
    let installed = state.join("installed");
    let base = installed.join("base");
    std::fs::create_dir_all(&installed).expect("a directory");
    if !base.exists() {
        let made = variable("CUBE_ARTIFACTS").join("templates/base");
        std::os::unix::fs::symlink(made, &base).expect("a link");
    }
    installed
}

/// Makes a copy of the template `base` in `dir` with this list of warm-up requests.
pub(crate) fn template_with(dir: &Path, warm_up: &[u8]) {
    let made = variable("CUBE_ARTIFACTS").join("templates/base");
    fs::create_dir_all(dir).expect("a directory");
    for name in names(&made) {
        let link = dir.join(&name);
        if !link.exists() {
            std::os::unix::fs::symlink(made.join(&name), link).expect("a link");
        }
    }
    fs::write(dir.join(template_file::WARM_UP), warm_up).expect("the list");
}

/// Opens a pool on an empty state directory.
pub(crate) async fn open(state: &State, warm: u32) -> Pool {
    let (pool, recovered, _) = Pool::open(config(&state.0, warm)).await.expect("a pool");
    assert!(recovered.alive.is_empty() && recovered.lost.is_empty());
    pool
}

pub(crate) fn spec() -> CreateSpec {
    CreateSpec {
        template: "base".into(),
        init: Init::default(),
        note: String::new(),
        lifetime: lifetime(3600),
        policy: netisolation::Policy::default(),
        priority: pool::Priority::default(),
    }
}

/// A lifetime of `timeout_s` seconds from now.
pub(crate) fn lifetime(timeout_s: u32) -> Lifetime {
    let since = UNIX_EPOCH.elapsed().expect("a clock");
    let mut lifetime = Lifetime::default();
    lifetime.set(u64::try_from(since.as_millis()).expect("a time"), timeout_s);
    lifetime
}

/// Resumes a paused sandbox. A running one refuses.
pub(crate) async fn resume(pool: &Pool, id: &SandboxId) -> Result<Sandbox, PoolError> {
    let wake = Wake::Resume { auto_pause: None };
    let connected = pool.connect(id, Some(3600), wake).await?;
    assert!(connected.resumed);
    Ok(connected.sandbox)
}

/// Waits until `warm` slots are warm and none is being filled.
pub(crate) async fn until_warm(pool: &Pool, warm: u32) {
    until("the stock is full", async || {
        let stats = pool.stats().await;
        (stats.warm == warm && stats.filling == 0).then_some(())
    })
    .await;
}

/// Repeats a query until it returns a value.
pub(crate) async fn until<T>(what: &str, ask: impl AsyncFnMut() -> Option<T>) -> T {
    until_within(PATIENCE, what, ask).await
}

/// Like [`until`], with a different deadline.
pub(crate) async fn until_within<T>(
    patience: Duration,
    what: &str,
    mut ask: impl AsyncFnMut() -> Option<T>,
) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Runs a command as root and waits for its end.
pub(crate) fn exec(sandbox: &Sandbox, token: Option<&str>, script: &str) -> ExecOutput {
    let mut agent = EnvdClient::connect(&sandbox.vsock, ENVD_PORT, PATIENCE)
        .unwrap_or_else(|e| panic!("no agent: {e:?}"));
    agent.set_access_token(token.map(ToOwned::to_owned));
    let mut request = ExecRequest::new("/bin/bash", &["-c", script]);
    request.user = Some("root".into());
    agent
        .exec(&request, PATIENCE)
        .unwrap_or_else(|e| panic!("{script}: {e:?}"))
}

/// Runs a command as root, which must succeed, and returns its output.
pub(crate) async fn sh(sandbox: &Sandbox, script: &str) -> String {
    let (sandbox, script) = (sandbox.clone(), script.to_owned());
    let run = tokio::task::spawn_blocking(move || {
        let out = exec(&sandbox, None, &script);
        let text = |b: &[u8]| String::from_utf8_lossy(b).trim_end().to_owned();
        assert!(
            out.exit_code == 0,
            "{script}: {} {}",
            out.status,
            text(&out.stderr)
        );
        text(&out.stdout)
    });
    run.await.expect("a command")
}
