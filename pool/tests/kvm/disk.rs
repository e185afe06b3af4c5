//! A disk that fills up while sandboxes write, pause, snapshot and fork: no existing sandbox or template is lost.
//!
//! The test starts this program again in a separate mount namespace, where a small file system is mounted over the
//! directory of the layers. The state directory is on it as well.

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    process::Command,
};

use model::Bytes;
use pool::{OnClose, PauseMode, Pool, PoolConfig, PoolError, Sandbox, SandboxState};

use super::{
    lifecycle::run,
    support::{FULL, SERVER, State, config, resume, sh, spec, until},
};

/// Size of the small disk in bytes: enough for a few sandboxes and their snapshots, but not for all that the guests
/// write.
const DISK: u64 = 448 << 20;
const BALLAST: u64 = 160 << 20;
const LAYERS: &str = "/var/tmp";
const REST: &str = "/var/tmp/rest";

pub(crate) fn kvm_a_full_disk_loses_nothing() {
    let state = State::new();
    let image = state.0.join("disk.img");
    let file = File::create(&image).expect("an image");
    file.set_len(DISK).expect("a sparse file");
    succeed(Command::new("mkfs.ext4").arg("-q").arg(&image));
    let this = std::env::current_exe().expect("this program");
    succeed(
        Command::new("unshare")
            .args(["--mount", "--propagation", "private"])
            .arg(this)
            .env(SERVER, "/var/tmp/state")
            .env(FULL, &image),
    );
}

pub(crate) fn succeed(command: &mut Command) {
    let status = command.status().expect("a program");
    assert!(status.success(), "{command:?}: {status}");
}

/// Runs the test in the mount namespace. The file system is unmounted when the namespace's last process exits.
pub(crate) fn be_on_a_small_disk(state: &Path, image: &Path) {
    succeed(
        Command::new("mount")
            .args(["-o", "loop"])
            .arg(image)
            .arg(LAYERS),
    );
    fs::create_dir_all(state).expect("a state directory");
    let ballast = Path::new(LAYERS).join("ballast");
    fs::write(&ballast, vec![1; usize::try_from(BALLAST).expect("a size")]).expect("ballast");
    run(async {
        let (pool, ..) = Pool::open(on_small_disk(state)).await.expect("a pool");
        let [a, b, c] = [
            sandbox(&pool, "a").await,
            sandbox(&pool, "b").await,
            sandbox(&pool, "c").await,
        ];
        pool.pause(&c.id, PauseMode::Memory).await.expect("a pause");
        fill_up(&pool, &a, &b).await;
        let refused = pool.create(spec()).await.expect_err("no room");
        let text = refused.to_string();
        assert!(text.contains("delete paused sandboxes"), "{text}");

        // A server that starts now recovers all of them, with their last records.
        pool.close(OnClose::Keep).await;
        let (pool, recovered, _ended) = Pool::open(on_small_disk(state)).await.expect("a pool");
        assert!(recovered.lost.is_empty(), "{:?}", recovered.lost);
        let mut alive: Vec<_> = recovered
            .alive
            .iter()
            .map(|found| (found.note.as_ref(), found.state))
            .collect();
        alive.sort_by_key(|(note, _)| *note);
        let paused = SandboxState::Paused(PauseMode::Memory);
        let running = SandboxState::Running;
        assert_eq!(alive, [("a", running), ("b", running), ("c", paused)]);

        for file in [ballast.as_path(), Path::new(REST)] {
            fs::remove_file(file).expect("more room");
        }
        let c = resume(&pool, &c.id).await.expect("a resume");
        for (sandbox, note) in [(&a, "a"), (&b, "b"), (&c, "c")] {
            assert_eq!(
                sh(sandbox, "cat /dev/shm/note /root/note").await,
                format!("{note}\n{note}")
            );
        }
        // Now there is room for the refused operations.
        pool.kill(&b.id).await.expect("a kill");
        pool.snapshot(&a.id, vec!["later".into()])
            .await
            .expect("a snapshot");
        pool.pause(&a.id, PauseMode::Memory).await.expect("a pause");
        let d = pool.create(spec()).await.expect("a sandbox");
        assert_eq!(sh(&d, "echo on").await, "on");
        pool.close(OnClose::Kill).await;
    });
}

fn on_small_disk(state: &Path) -> PoolConfig {
    PoolConfig {
        disk_reserve: Bytes::mib(32),
        ..config(state, 0)
    }
}

/// Makes a sandbox with its name in memory, on its disk and in its note.
pub(crate) async fn sandbox(pool: &Pool, name: &str) -> Sandbox {
    let mut spec = spec();
    spec.note = name.into();
    let sandbox = pool.create(spec).await.expect("a sandbox");
    sh(
        &sandbox,
        &format!("echo {name} | tee /dev/shm/note > /root/note; sync"),
    )
    .await;
    sandbox
}

/// Makes a guest fill the disk, and takes snapshots and forks until both are refused.
async fn fill_up(pool: &Pool, source: &Sandbox, writer: &Sandbox) {
    let script = "(dd if=/dev/zero of=/root/fill bs=1M count=320; sync) > /dev/shm/dd 2>&1 < /dev/null & disown";
    sh(writer, script).await;
    let mut rest = File::create(REST).expect("a file");
    until("everything is refused", async || {
        let mut refused = 0;
        let snapshot = pool.snapshot(&source.id, vec![]).await.map(drop);
        let forks = pool.fork(&source.id, vec![spec()]).await;
        let forks = forks.map(|forks| forks.into_iter().flatten().collect::<Vec<_>>());
        for fork in forks.as_deref().unwrap_or_default() {
            pool.kill(&fork.id).await.expect("a kill");
        }
        for answer in [snapshot, forks.map(drop)] {
            match answer {
                Ok(()) => {}
                Err(PoolError::NoSpace(_)) => refused += 1,
                Err(other) => panic!("another refusal: {other:?}"),
            }
        }
        // Other programs of the host fill the disk as well, including the blocks reserved for root.
        let full = rest.write_all(&[1; 16 << 20]).is_err();
        (refused == 2 && full && free() == 0).then_some(())
    })
    .await;
    let pause = pool.pause(&source.id, PauseMode::Memory).await;
    assert!(matches!(pause, Err(PoolError::NoSpace(_))), "{pause:?}");
    // The record may or may not fit; if not, the old one stays.
    let policy = netisolation::Policy::default();
    if let Err(e) = pool.set_policy(&source.id, policy, "a".into()).await {
        println!("a note on a full disk: {e}");
    }
    for sandbox in [source, writer] {
        assert_eq!(sh(sandbox, "cat /dev/shm/note").await.len(), 1);
    }
}

/// Free space of the small disk for unprivileged processes, in MiB.
fn free() -> u64 {
    let stat = nix::sys::statvfs::statvfs(LAYERS).expect("figures");
    (stat.blocks_available() * stat.fragment_size()) >> 20
}
