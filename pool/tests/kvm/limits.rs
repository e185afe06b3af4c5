//! Tests of admission, eviction and limits, and tests that random operations and killed servers leave nothing behind.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use model::{Bytes, SandboxId};
use pool::{OnClose, PauseMode, Pool, PoolError, SandboxState};

use super::{
    lifecycle::run,
    support::{BUSY, SERVER, State, config, kill, open, resume, sh, spec, until, until_warm},
};

fn refused(answer: Result<pool::Sandbox, PoolError>) -> (String, Duration) {
    match answer {
        Err(PoolError::Full { why, retry_after }) => (why, retry_after),
        other => panic!("not refused: {other:?}"),
    }
}

pub(crate) fn kvm_what_does_not_fit_is_refused() {
    run(async {
        let state = State::new();
        let mut small = config(&state.0, 0);
        small.max_sandboxes = 1;
        let (pool, ..) = Pool::open(small).await.expect("a pool");
        let a = pool.create(spec()).await.expect("a sandbox");
        let (why, retry_after) = refused(pool.create(spec()).await);
        assert!(
            why.contains("limit") && retry_after > Duration::ZERO,
            "{why}"
        );
        // A paused sandbox does not count towards the limit, and cannot be resumed while the limit is reached.
        pool.pause(&a.id, PauseMode::Memory).await.expect("a pause");
        let b = pool.create(spec()).await.expect("a sandbox");
        refused(resume(&pool, &a.id).await);
        pool.kill(&b.id).await.expect("a kill");
        resume(&pool, &a.id).await.expect("a resume");
        assert_eq!(pool.stats().await.refused, 2);
        pool.close(OnClose::Kill).await;

        // All of the host's memory is reserved.
        let mut none = config(&state.0, 2);
        none.memory_reserve = Bytes(1 << 50);
        none.warm = pool::WarmMarks { low: 1, high: 2 };
        let (pool, ..) = Pool::open(none).await.expect("a pool");
        let (why, _) = refused(pool.create(spec()).await);
        assert!(why.contains("MiB"), "{why}");
        let stats = pool.stats().await;
        assert_eq!(
            (stats.warm, stats.filling, stats.available_bytes),
            (0, 0, 0)
        );
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

/// Returns how long a pool takes to end `count` unresponsive VMMs. During this time it serves a sandbox that responds.
async fn ended_silent(count: usize) -> Duration {
    let state = State::new();
    let pool = open(&state, 0).await;
    let mut silent = Vec::new();
    for _ in 0..count {
        silent.push(pool.create(spec()).await.expect("a sandbox").id);
    }
    let silent_pids = state.processes();
    let speaking = pool.create(spec()).await.expect("a sandbox").id;
    pool.close(OnClose::Keep).await;
    for pid in silent_pids {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a process id"));
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).expect("a VMM");
    }
    let mut impatient = config(&state.0, 0);
    impatient.adopt_timeout = Duration::from_secs(3);
    let began = Instant::now();
    let (pool, recovered, mut ended) = Pool::open(impatient).await.expect("a pool");
    assert!(recovered.lost.is_empty());
    // Clients see all of them until they are known to be lost, and a silent VMM does not delay other sandboxes.
    assert_eq!(pool.list().await.expect("a list").len(), count + 1);
    let sandbox = pool.reach(&speaking).await.expect("the sandbox");
    assert_eq!(sh(&sandbox, "echo served").await, "served");
    assert!(
        ended.try_recv().is_err(),
        "served after the silent VMMs were ended"
    );
    let mut lost = Vec::new();
    for _ in 0..count {
        let end = ended.recv().await.expect("an end");
        let why = end.why.expect("a reason");
        assert!(why.contains("does not respond"), "{}: {why}", end.id);
        lost.push(end.id);
    }
    let took = began.elapsed();
    lost.sort();
    silent.sort();
    assert_eq!(lost, silent);
    pool.close(OnClose::Kill).await;
    state.assert_clean();
    took
}

pub(crate) fn kvm_silent_vmms_are_waited_for_together() {
    run(async {
        let one = ended_silent(1).await;
        let three = ended_silent(3).await;
        assert!(three < 2 * one, "{three:?} for three, {one:?} for one");
    });
}

pub(crate) fn kvm_paused_sandboxes_and_snapshots_are_limited() {
    run(async {
        let state = State::new();
        let mut small = config(&state.0, 0);
        small.max_saved = 2;
        let (pool, ..) = Pool::open(small.clone()).await.expect("a pool");
        let a = pool.create(spec()).await.expect("a sandbox");
        let b = pool.create(spec()).await.expect("a sandbox");
        let c = pool.create(spec()).await.expect("a sandbox");
        // Pauses and snapshots under way count.
        let (first, second, third) = tokio::join!(
            pool.pause(&a.id, PauseMode::Memory),
            pool.snapshot(&b.id, vec!["one".into()]),
            pool.pause(&c.id, PauseMode::Memory),
        );
        first.expect("a pause");
        second.expect("a snapshot");
        let is_refused = |answer| is_one_too_many(2, answer);
        is_refused(third);
        is_refused(pool.pause(&c.id, PauseMode::FilesystemOnly).await);
        is_refused(pool.snapshot(&c.id, Vec::new()).await.map(drop));
        is_refused(pool.snapshot(&a.id, Vec::new()).await.map(drop));
        // The refused sandbox continues, and a fork keeps no snapshot.
        assert_eq!(sh(&c, "echo on").await, "on");
        let forks = pool.fork(&c.id, vec![spec()]).await.expect("a fork");
        assert!(forks.iter().all(Result::is_ok), "{forks:?}");
        // A resume and the removal of a snapshot each make room for one more.
        resume(&pool, &a.id).await.expect("a resume");
        pool.pause(&c.id, PauseMode::Memory).await.expect("a pause");
        is_refused(pool.pause(&a.id, PauseMode::Memory).await);
        pool.remove_template("one").await.expect("a removal");
        pool.pause(&a.id, PauseMode::Memory).await.expect("a pause");
        pool.close(OnClose::Keep).await;

        // A server with a lower limit keeps existing pauses and snapshots.
        small.max_saved = 1;
        let (pool, recovered, _) = Pool::open(small).await.expect("a pool");
        assert!(recovered.lost.is_empty(), "{:?}", recovered.lost);
        is_one_too_many(1, pool.snapshot(&a.id, Vec::new()).await.map(drop));
        resume(&pool, &a.id).await.expect("a resume");
        is_one_too_many(1, pool.pause(&a.id, PauseMode::Memory).await);
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

fn is_one_too_many(limit: u32, answer: Result<(), PoolError>) {
    let text = match answer {
        Err(PoolError::TooManySaved(max)) if max == limit => {
            PoolError::TooManySaved(max).to_string()
        }
        other => panic!("not refused: {other:?}"),
    };
    assert!(
        text.contains("delete") && text.contains("pool.max_saved"),
        "{text}"
    );
}

pub(crate) fn kvm_warm_slots_are_evicted() {
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        let a = pool.create(spec()).await.expect("a sandbox");
        pool.snapshot(&a.id, vec!["other".into()])
            .await
            .expect("a snapshot");
        pool.close(OnClose::Kill).await;

        let mut small = config(&state.0, 1);
        small.max_sandboxes = 1;
        let (pool, ..) = Pool::open(small).await.expect("a pool");
        until_warm(&pool, 1).await;
        let mut other = spec();
        other.template = "other".into();
        let b = pool.create(other).await.expect("a sandbox");
        assert!(!b.warm);
        refused(pool.create(spec()).await);
        assert_eq!(pool.stats().await.warm, 0);
        pool.kill(&b.id).await.expect("a kill");
        // The warm stock is refilled when there is room.
        until_warm(&pool, 1).await;
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_each_vm_is_in_its_control_group() {
    run(async {
        let state = State::new();
        let pool = open(&state, 1).await;
        until_warm(&pool, 1).await;
        let a = pool.create(spec()).await.expect("a sandbox");
        let groups: Vec<_> = state
            .groups()
            .into_iter()
            .filter(|g| g.ends_with(a.id.as_str()))
            .collect();
        if groups.is_empty() {
            println!("this host has no cgroup controllers: only the absence of groups is tested");
        }
        for group in &groups {
            let procs = fs::read_to_string(group.join("cgroup.procs")).expect("its processes");
            assert_eq!(procs.trim(), a.pid.to_string(), "{}", group.display());
            let memory = a.template.memory.0 + (64 << 20);
            for (file, want) in [
                ("memory.limit_in_bytes", memory.to_string()),
                ("memory.max", memory.to_string()),
                ("memory.memsw.limit_in_bytes", memory.to_string()),
                ("memory.swap.max", "0".to_owned()),
                ("cpu.shares", "1024".to_owned()),
                ("cpu.weight", "100".to_owned()),
                ("pids.max", "16".to_owned()),
            ] {
                if let Ok(limit) = fs::read_to_string(group.join(file)) {
                    assert_eq!(limit.trim(), want, "{}", group.display());
                }
            }
        }
        pool.kill(&a.id).await.expect("a kill");
        assert!(groups.iter().all(|g| !g.exists()));
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_the_sandbox_of_a_caller_that_left_is_ended() {
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        for _ in 0..3 {
            let create = tokio::spawn({
                let pool = pool.clone();
                async move { pool.create(spec()).await }
            });
            until("it is being made", async || {
                (!state.sandboxes().is_empty()).then_some(())
            })
            .await;
            create.abort();
            // On a fast host the create may already have succeeded.
            if let Ok(created) = create.await {
                let sandbox = created.expect("a sandbox");
                pool.kill(&sandbox.id).await.expect("a kill");
            }
            until("it is gone", async || {
                (state.sandboxes().is_empty() && state.processes().is_empty()).then_some(())
            })
            .await;
        }
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

/// A pseudorandom generator.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        // xorshift64 (Marsaglia 2003).
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(sides).expect("sides")).expect("a side")
    }
}

/// Runs this program as a busy server: it performs all kinds of operations concurrently and prints a line for each,
/// until it is killed.
pub(crate) fn be_busy(state: &Path) {
    run(async {
        let (pool, recovered, _ended) = Pool::open(config(state, 2)).await.expect("a pool");
        let mut known: Vec<SandboxId> = recovered.alive.into_iter().map(|s| s.id).collect();
        let mut dice = Dice(u64::from(std::process::id()) << 20 | 1);
        loop {
            println!("{}", known.len());
            let (later, what) = (pool.clone(), dice.roll(4));
            match known.pop() {
                Some(id) if known.len() > 4 => drop(later.kill(&id).await),
                Some(id) if what < 3 => {
                    known.insert(0, id.clone());
                    tokio::spawn(async move {
                        let _ = match what {
                            0 => later.pause(&id, PauseMode::Memory).await,
                            1 => resume(&later, &id).await.map(drop),
                            _ => later.fork(&id, vec![spec()]).await.map(drop),
                        };
                    });
                }
                _ => known.extend(later.create(spec()).await.map(|s| s.id).ok()),
            }
        }
    });
}

/// After a server is killed at any time, the next one recovers each sandbox, and no other VMM runs.
pub(crate) fn kvm_a_server_is_killed_at_any_moment() {
    run(async {
        let state = State::new();
        let mut dice = Dice(u64::from(std::process::id()) << 20 | 3);
        for round in 0..6 {
            let mut server = Command::new(std::env::current_exe().expect("this program"))
                .env(SERVER, &state.0)
                .env(BUSY, "1")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .expect("a server");
            let out = BufReader::new(server.stdout.take().expect("a pipe"));
            let lines = out.lines().take(3 + dice.roll(25)).count();
            server.kill().expect("a kill");
            server.wait().expect("its end");
            let (pool, recovered, mut ended) =
                Pool::open(config(&state.0, 0)).await.expect("a pool");
            println!("{round}: {lines} lines, {} alive", recovered.alive.len());
            assert!(recovered.lost.is_empty(), "{:?}", recovered.lost);
            let mut pids = Vec::new();
            for found in recovered.alive {
                let sandbox = match found.state {
                    SandboxState::Running => match pool.reach(&found.id).await {
                        Ok(sandbox) => sandbox,
                        Err(e) => panic!("not adopted: {e} {:?}", ended.recv().await),
                    },
                    SandboxState::Paused(_) => resume(&pool, &found.id).await.expect("a resume"),
                };
                assert_eq!(sh(&sandbox, "hostname").await, sandbox.id.as_str());
                pids.push(sandbox.pid);
            }
            pids.sort_unstable();
            until("VMMs without a sandbox end", async || {
                let mut processes = state.processes();
                processes.sort_unstable();
                (processes == pids).then_some(())
            })
            .await;
            // The next server adopts the sandboxes that run now.
            pool.close(OnClose::Keep).await;
        }
        let (pool, ..) = Pool::open(config(&state.0, 0)).await.expect("a pool");
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

/// Random concurrent operations on a few sandboxes, while VMs are killed from outside.
pub(crate) fn kvm_random_lives_leave_nothing() {
    run(async {
        let state = State::new();
        let seed = std::time::SystemTime::UNIX_EPOCH
            .elapsed()
            .expect("a clock")
            .as_nanos();
        let seed = u64::try_from(seed & u128::from(u64::MAX)).expect("64 bits") | 1;
        println!("seed {seed}");
        let mut dice = Dice(seed);
        let pool = open(&state, 2).await;
        let mut known: Vec<SandboxId> = Vec::new();
        let mut open_ends = Vec::new();
        for _ in 0..120 {
            let any = (!known.is_empty()).then(|| known[dice.roll(known.len())].clone());
            let later = pool.clone();
            let what = dice.roll(8);
            match (what, any) {
                (0 | 1, _) | (_, None) => {
                    if let Ok(sandbox) = pool.create(spec()).await {
                        known.push(sandbox.id);
                    }
                }
                (2, Some(id)) => open_ends.push(tokio::spawn(async move {
                    let _ = later.pause(&id, PauseMode::Memory).await;
                })),
                (3, Some(id)) => open_ends.push(tokio::spawn(async move {
                    let _ = resume(&later, &id).await;
                })),
                (4, Some(id)) => open_ends.push(tokio::spawn(async move {
                    let _ = later.kill(&id).await;
                })),
                (5, Some(id)) => {
                    if let Ok(forks) = pool.fork(&id, vec![spec(); 2]).await {
                        known.extend(forks.into_iter().flatten().map(|s| s.id));
                    }
                }
                (6, Some(id)) => open_ends.push(tokio::spawn(async move {
                    let policy = netisolation::Policy::default();
                    let _ = later.set_policy(&id, policy, "note".repeat(100)).await;
                })),
                (_, Some(_)) => {
                    let processes = state.processes();
                    if !processes.is_empty() {
                        kill(processes[dice.roll(processes.len())]);
                    }
                }
            }
            if known.len() > 8 {
                let id = known.swap_remove(dice.roll(known.len()));
                let _ = pool.kill(&id).await;
            }
        }
        for end in open_ends {
            end.await.expect("an answer");
        }
        // The pool still works, and removes everything when it closes.
        let last = pool.create(spec()).await.expect("a sandbox");
        assert_eq!(sh(&last, "echo on").await, "on");
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}
