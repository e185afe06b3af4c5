//! Disks that fail while sandboxes run: a read-only file system, I/O errors, and the state of a real ext4 after a power
//! loss. Each test starts this program again in a separate mount namespace.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use model::SandboxId;
use netisolation::Policy;
use pool::{OnClose, PauseMode, Pool, PoolError, Sandbox, SandboxState, TimeoutChange};

use super::{
    disk::{sandbox, succeed},
    lifecycle::run,
    support::{FAULT, SERVER, State, config, kill, names, resume, sh, spec, until},
    sys,
};

/// Size of the file system that will fail, in bytes.
const DISK: u64 = 512 << 20;

pub(crate) fn kvm_a_read_only_disk_refuses_changes_and_loses_nothing() {
    in_a_namespace("read-only");
}

pub(crate) fn kvm_a_broken_disk_refuses_changes_and_a_power_loss_keeps_what_was_answered() {
    in_a_namespace("broken");
}

fn in_a_namespace(fault: &str) {
    let state = State::new();
    let image = File::create(state.0.join("disk.img")).expect("an image");
    image.set_len(DISK).expect("a sparse file");
    let this = std::env::current_exe().expect("this program");
    succeed(
        Command::new("unshare")
            .args(["--mount", "--propagation", "private"])
            .arg(this)
            .env(SERVER, &state.0)
            .env(FAULT, fault),
    );
}

/// A server that cannot read a record ends no process, removes no file or cgroup of the sandbox, and logs the path of
/// the record. Once the record is repaired, the next server recovers the sandbox.
pub(crate) fn kvm_a_record_that_cannot_be_read_costs_no_sandbox() {
    run(async {
        let state = State::new();
        let (pool, ..) = Pool::open(config(&state.0, 0)).await.expect("a pool");
        let torn = sandbox(&pool, "torn").await;
        let unreadable = sandbox(&pool, "unreadable").await;
        let paused = sandbox(&pool, "paused").await;
        pool.pause(&paused.id, PauseMode::Memory)
            .await
            .expect("a pause");
        pool.close(OnClose::Keep).await;
        let owned = || {
            let sorted = |mut names: Vec<_>| {
                names.sort();
                names
            };
            let groups = state.groups().into_iter().map(|g| g.display().to_string());
            (
                sorted(state.sandboxes()),
                state.processes(),
                sorted(groups.collect()),
            )
        };
        let before = owned();
        let all = [&torn, &unreadable, &paused];
        let record = |of: &Sandbox| {
            let dir = state.0.join("sandboxes").join(of.id.as_str());
            dir.join("record.json")
        };
        let records = all.map(|of| fs::read(record(of)).expect("a record"));
        fs::write(record(&torn), "{\"version\"").expect("a torn record");
        for of in [&unreadable, &paused] {
            // Every read of a directory fails.
            fs::remove_file(record(of)).expect("no record");
            fs::create_dir(record(of)).expect("a directory");
        }
        let (pool, recovered, _ended) = Pool::open(config(&state.0, 0)).await.expect("a pool");
        assert!(recovered.alive.is_empty());
        for of in all {
            let named = recovered.lost.iter().find(|(id, _)| *id == of.id);
            let (_, why) = named.expect("a report");
            assert!(why.contains(&record(of).display().to_string()), "{why}");
        }
        // The pool closes when all leftovers of the previous server have been removed.
        pool.close(OnClose::Kill).await;
        assert_eq!(owned(), before);

        for of in [&unreadable, &paused] {
            fs::remove_dir(record(of)).expect("no directory");
        }
        for (of, bytes) in all.iter().zip(records) {
            fs::write(record(of), bytes).expect("the record");
        }
        let (pool, recovered, _ended) = Pool::open(config(&state.0, 0)).await.expect("a pool");
        assert_eq!((recovered.alive.len(), &recovered.lost[..]), (3, &[][..]));
        resume(&pool, &paused.id).await.expect("a resume");
        for (of, note) in all.iter().zip(["torn", "unreadable", "paused"]) {
            assert_eq!(sh(of, "cat /dev/shm/note").await, note);
        }
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

/// Runs a test in its mount namespace. File systems are unmounted when the namespace's last process exits.
pub(crate) fn be_on_a_failing_disk(dir: &Path, fault: &str) {
    let state = dir.join("s");
    fs::create_dir(&state).expect("a state directory");
    run(async {
        match fault {
            "read-only" => read_only(&state).await,
            _ => broken(&dir.join("disk.img"), &state).await,
        }
    });
}

async fn read_only(state: &Path) {
    let (pool, ..) = Pool::open(config(state, 0)).await.expect("a pool");
    let (a, b) = (sandbox(&pool, "a").await, sandbox(&pool, "b").await);
    pool.pause(&b.id, PauseMode::Memory).await.expect("a pause");

    // A read-only mount over the directory: every path to it now leads to a read-only file system.
    let mount = |args: &[&str]| succeed(Command::new("mount").args(args).arg(state));
    mount(&["--bind", state.to_str().expect("a path")]);
    mount(&["-o", "remount,bind,ro"]);
    for (what, refused) in changes(&pool, &a.id, &b.id).await {
        let error = refused.expect_err(what).to_string();
        assert!(error.contains("Read-only file system"), "{what}: {error}");
    }
    assert_eq!(sh(&a, "cat /dev/shm/note").await, "a");
    let paused = SandboxState::Paused(PauseMode::Memory);
    assert_eq!(pool.get(&b.id).await.expect("the sandbox").state, paused);

    succeed(Command::new("umount").arg(state));
    pool.pause(&a.id, PauseMode::Memory).await.expect("a pause");
    pool.close(OnClose::Keep).await;
    let (pool, recovered, _ended) = Pool::open(config(state, 0)).await.expect("a pool");
    assert_eq!((recovered.alive.len(), &recovered.lost[..]), (2, &[][..]));
    for (id, note) in [(&a.id, "a"), (&b.id, "b")] {
        let resumed = resume(&pool, id).await.expect("a resume");
        assert_eq!(
            sh(&resumed, "cat /dev/shm/note /root/note").await,
            format!("{note}\n{note}")
        );
    }
    pool.close(OnClose::Kill).await;
}

async fn broken(image: &Path, state: &Path) {
    succeed(Command::new("mkfs.ext4").arg("-q").arg(image));
    let mount = || {
        succeed(
            Command::new("mount")
                .args(["-o", "loop"])
                .args([image, state]),
        )
    };
    mount();
    let (pool, ..) = Pool::open(config(state, 0)).await.expect("a pool");
    let a = sandbox(&pool, "a").await;
    let b = sandbox(&pool, "b").await;
    let killed = sandbox(&pool, "killed").await;
    let template = pool
        .snapshot(&a.id, vec!["kept".into()])
        .await
        .expect("a snapshot");
    for id in [&b.id, &killed.id] {
        pool.pause(id, PauseMode::Memory).await.expect("a pause");
    }
    pool.kill(&killed.id).await.expect("a kill");

    // From now on the file system returns EIO, and its journal contains only what is already on disk.
    sys::shut_down(&File::open(state).expect("the file system")).expect("EXT4_IOC_SHUTDOWN");
    for (what, refused) in changes(&pool, &a.id, &b.id).await {
        let error = refused.expect_err(what).to_string();
        assert!(error.contains("Input/output error"), "{what}: {error}");
    }
    assert_eq!(sh(&a, "cat /dev/shm/note").await, "a");
    pool.close(OnClose::Keep).await;

    // The host comes back: no VMM runs, and ext4 replays its journal.
    kill(a.pid);
    until("the file system is unmounted", async || {
        Command::new("umount")
            .arg(state)
            .status()
            .ok()
            .filter(|s| s.success())
    })
    .await;
    mount();
    let (pool, recovered, _ended) = Pool::open(config(state, 0)).await.expect("a pool");
    let alive: Vec<_> = recovered.alive.iter().map(|found| &found.id).collect();
    assert_eq!(alive, [&b.id]);
    let b = resume(&pool, &b.id).await.expect("a resume");
    assert_eq!(sh(&b, "cat /dev/shm/note /root/note").await, "b\nb");
    let mut from_template = spec();
    from_template.template = "kept".into();
    assert_eq!(
        pool.template("kept").await.expect("the template").id,
        template.id
    );
    let clone = pool.create(from_template).await.expect("a sandbox");
    assert_eq!(sh(&clone, "cat /dev/shm/note").await, "a");
    pool.close(OnClose::Kill).await;
}

/// Requests that must write to the state directory: `a` runs, `b` is paused.
async fn changes(
    pool: &Pool,
    a: &SandboxId,
    b: &SandboxId,
) -> [(&'static str, Result<(), PoolError>); 7] {
    [
        ("create", pool.create(spec()).await.map(drop)),
        ("pause", pool.pause(a, PauseMode::Memory).await),
        ("snapshot", pool.snapshot(a, vec![]).await.map(drop)),
        (
            "set a deadline",
            pool.set_timeout(a, TimeoutChange::Replace, 3600).await,
        ),
        (
            "set a policy",
            pool.set_policy(a, Policy::default(), "a".into()).await,
        ),
        ("resume", resume(pool, b).await.map(drop)),
        ("kill", pool.kill(b).await),
    ]
}

/// The time of a start grows at most linearly with the number of directories left by a crash.
pub(crate) fn kvm_ten_thousand_leftover_directories_are_swept() {
    run(async {
        let few = swept(1000).await;
        let many = swept(10_000).await;
        println!("1000 directories: {few:?}; 10 000: {many:?}");
        assert!(
            many < few * 40,
            "1000 directories: {few:?}; 10 000: {many:?}"
        );
    });
}

/// How long a pool takes to open and to remove `count` directories.
async fn swept(count: u32) -> Duration {
    let state = State::new();
    let sandboxes = state.0.join("sandboxes");
    fs::create_dir(&sandboxes).expect("a directory");
    for n in 0..count {
        let mut random = [0; 19];
        // Each byte becomes one of 36 characters.
        for (digit, byte) in random.iter_mut().take(4).enumerate() {
            *byte = u8::try_from(n / 36_u32.pow(u32::try_from(digit).expect("a digit")) % 36)
                .expect("a digit");
        }
        let dir: PathBuf = sandboxes.join(SandboxId::from_random(random).as_str());
        fs::create_dir(&dir).expect("a directory");
        fs::write(dir.join("console.log"), "text").expect("a file");
        match n % 3 {
            0 => {}
            1 => fs::write(dir.join("record.json"), "").expect("a torn record"),
            _ => fs::write(dir.join("record.json.new"), "{").expect("a draft"),
        }
    }
    assert_eq!(
        names(&sandboxes).len(),
        usize::try_from(count).expect("a number")
    );
    let begun = Instant::now();
    let (pool, ..) = Pool::open(config(&state.0, 0)).await.expect("a pool");
    until("all directories are removed", async || {
        names(&sandboxes).is_empty().then_some(())
    })
    .await;
    let taken = begun.elapsed();
    pool.close(OnClose::Kill).await;
    taken
}
