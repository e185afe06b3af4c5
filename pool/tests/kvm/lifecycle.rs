//! The life of sandboxes, and their fate when the pool's own process is killed.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};

use envd::ENVD_PORT;
use model::{StartPhase, WarmUpRequest};
use pool::{
    CreateSpec, Init, OnClose, PauseMode, Pool, PoolError, Refusal, SandboxState, TemplateKind,
};

use super::support::{
    SERVER, State, config, exec, kill, open, resume, sh, spec, template_with, until, until_warm,
};

/// Runs a test on a runtime like that of the server.
pub(crate) fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(test);
}

pub(crate) fn kvm_a_lease_is_a_machine_of_its_own() {
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        let mut spec = spec();
        spec.init = Init {
            env_vars: [("WHO".to_owned(), "me".to_owned())].into(),
            access_token: Some("secret".into()),
        };
        let a = pool.create(spec.clone()).await.expect("a sandbox");
        let b = pool.create(spec).await.expect("a sandbox");
        assert!(!a.warm && a.timeline.at(StartPhase::Accepted).is_some());
        let of = |s: &pool::Sandbox| {
            let script = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; echo $WHO";
            let out = exec(s, Some("secret"), script);
            let text = String::from_utf8_lossy(&out.stdout).into_owned();
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let (of_a, of_b) = (of(&a), of(&b));
        assert_eq!(
            (of_a[0].as_str(), of_b[0].as_str()),
            (a.id.as_str(), b.id.as_str())
        );
        assert!(
            of_a[1] != of_b[1] && of_a[2] != of_b[2],
            "{of_a:?} {of_b:?}"
        );
        assert_eq!(of_a[3], "me");
        let policy = netisolation::Policy::default();
        let noted = pool.set_policy(&a.id, policy, "mine".into()).await;
        noted.expect("a note");
        assert_eq!(pool.get(&a.id).await.expect("it").note.as_ref(), "mine");
        assert!(pool.usage(&a.id).await.expect("usage").memory > 0);
        assert_eq!(pool.stats().await.running, 2);
        pool.kill(&a.id).await.expect("a kill");
        let again = pool.kill(&a.id).await.expect_err("it is gone");
        assert!(again.is_not_found(), "{again}");
        assert!(!a.vsock.exists());
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_a_warm_slot_serves_one_lease() {
    run(async {
        let state = State::new();
        let pool = open(&state, 2).await;
        until_warm(&pool, 2).await;
        let a = pool.create(spec()).await.expect("a sandbox");
        let b = pool.create(spec()).await.expect("a sandbox");
        assert!(a.warm && b.warm);
        assert_eq!(sh(&a, "hostname").await, a.id.as_str());
        assert_ne!(
            sh(&a, "cat /etc/machine-id; od -An -N16 /dev/urandom").await,
            sh(&b, "cat /etc/machine-id; od -An -N16 /dev/urandom").await
        );
        // The clock is right, however long the slot was warm.
        let clock: u64 = sh(&a, "date +%s").await.parse().expect("seconds");
        let now = std::time::SystemTime::UNIX_EPOCH
            .elapsed()
            .expect("a clock")
            .as_secs();
        assert!(now.abs_diff(clock) <= 2, "{now} {clock}");
        until_warm(&pool, 2).await;
        pool.kill(&a.id).await.expect("a kill");
        let c = pool.create(spec()).await.expect("a sandbox");
        assert!(c.warm && c.id != a.id && c.id != b.id);
        let stats = pool.stats().await;
        assert_eq!((stats.warm_hits, stats.warm_misses), (3, 0));
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_a_warm_slot_has_answered_its_templates_requests() {
    run(async {
        let state = State::new();
        let mut config = config(&state.0, 1);
        let installed = state.0.join("asked");
        config.installed_templates = Some(installed.clone());
        let request = |port, body: &str| {
            let path = "/filesystem.Filesystem/MakeDir".to_owned();
            let body = body.to_owned();
            serde_json::to_vec(&[WarmUpRequest { port, path, body }]).expect("JSON")
        };
        let good = request(ENVD_PORT, r#"{"path":"/tmp/asked"}"#);
        template_with(&installed.join("good"), &good);
        let (pool, ..) = Pool::open(config.clone()).await.expect("a pool");
        until_warm(&pool, 1).await;
        let spec = || CreateSpec {
            template: "good".into(),
            ..spec()
        };
        let sandbox = pool.create(spec()).await.expect("a sandbox");
        assert!(sandbox.warm);
        sh(&sandbox, "test -d /tmp/asked").await;
        pool.close(OnClose::Kill).await;

        // A guest that refuses a warm-up request does not become warm. A create sends none and succeeds.
        template_with(&installed.join("good"), &request(ENVD_PORT, "no JSON"));
        let (pool, ..) = Pool::open(config).await.expect("a pool");
        until("a fill fails", async || {
            let stats = pool.stats().await;
            assert_eq!(stats.warm, 0);
            (!stats.failed.is_empty()).then_some(())
        })
        .await;
        let sandbox = pool.create(spec()).await.expect("a sandbox");
        assert!(!sandbox.warm);
        sh(&sandbox, "test ! -d /tmp/asked").await;
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_a_hundred_leases_leave_nothing() {
    run(async {
        let state = State::new();
        let pool = open(&state, 3).await;
        for _ in 0..100 {
            let sandbox = pool.create(spec()).await.expect("a sandbox");
            assert_eq!(sh(&sandbox, "echo on").await, "on");
            pool.kill(&sandbox.id).await.expect("a kill");
        }
        pool.close(OnClose::Kill).await;
        state.assert_clean();
        let open_files = std::fs::read_dir("/proc/self/fd")
            .expect("descriptors")
            .count();
        assert!(open_files < 60, "{open_files} descriptors are left");
    });
}

pub(crate) fn kvm_the_end_of_a_vm_is_reported() {
    run(async {
        let state = State::new();
        let (pool, _, mut ended) = Pool::open(config(&state.0, 0)).await.expect("a pool");
        let a = pool.create(spec()).await.expect("a sandbox");
        kill(a.pid);
        let end = ended.recv().await.expect("an end");
        assert_eq!(end.id, a.id);
        assert!(
            end.why.as_ref().is_some_and(|w| w.contains("killed")),
            "{end:?}"
        );
        let b = pool.create(spec()).await.expect("a sandbox");
        // The guest powers off, so the command gets no response.
        let off = "python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)'";
        let by_itself = {
            let b = b.clone();
            std::thread::spawn(move || std::panic::catch_unwind(|| exec(&b, None, off)).is_err())
        };
        let end = ended.recv().await.expect("an end");
        assert_eq!(end.id, b.id);
        assert!(
            end.why.as_ref().is_some_and(|w| w.contains("powered off")),
            "{end:?}"
        );
        let _ = by_itself.join();
        state.assert_clean();
        assert_eq!(pool.stats().await.died, 2);
        pool.close(OnClose::Kill).await;
    });
}

/// Runs this program as a server: it makes sandboxes, prints their ids, and waits to be killed.
pub(crate) fn be_server(state: &Path) {
    run(async {
        let (pool, _, _ended) = Pool::open(config(state, 2)).await.expect("a pool");
        until_warm(&pool, 2).await;
        for note in ["running", "paused", "to die"] {
            let mut spec = spec();
            spec.note = note.into();
            let sandbox = pool.create(spec).await.expect("a sandbox");
            sh(&sandbox, &format!("echo {note} > /dev/shm/note")).await;
            if note == "paused" {
                pool.pause(&sandbox.id, PauseMode::Memory)
                    .await
                    .expect("a pause");
            }
            println!("{} {}", sandbox.id, sandbox.pid);
        }
        until_warm(&pool, 2).await;
        println!("ready");
        std::future::pending::<()>().await;
    });
}

pub(crate) fn kvm_a_killed_server_is_followed_by_another() {
    run(async {
        let state = State::new();
        let mut server = Command::new(std::env::current_exe().expect("this program"))
            .env(SERVER, &state.0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a server");
        let out = BufReader::new(server.stdout.take().expect("a pipe"));
        let lines: Vec<String> = out
            .lines()
            .map(|l| l.expect("a line"))
            .take_while(|l| l != "ready")
            .collect();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(
            Pool::open(config(&state.0, 0)).await.is_err(),
            "two servers"
        );
        server.kill().expect("a kill");
        server.wait().expect("its end");
        let (doomed, pid) = lines[2].split_once(' ').expect("an id and a pid");
        let pid: u32 = pid.parse().expect("a process id");
        kill(pid);
        until("it is gone", async || {
            (!Path::new(&format!("/proc/{pid}")).exists()
                || std::fs::read_to_string(format!("/proc/{pid}/stat"))
                    .is_ok_and(|s| s.contains(") Z ")))
            .then_some(())
        })
        .await;

        let (pool, recovered, mut ended) = Pool::open(config(&state.0, 0)).await.expect("a pool");
        assert_eq!(recovered.lost.len(), 1, "{recovered:?}");
        assert_eq!(recovered.lost[0].0.as_str(), doomed);
        assert_eq!(recovered.alive.len(), 2, "{recovered:?}");
        for found in recovered.alive {
            let id = &found.id;
            let sandbox = match found.state {
                SandboxState::Running => pool.reach(id).await.expect("an adoption"),
                SandboxState::Paused(_) => resume(&pool, id).await.expect("a resume"),
            };
            assert_eq!(sh(&sandbox, "cat /dev/shm/note").await, *found.note);
            // An adopted sandbox is watched, paused and ended like any other.
            if found.note.as_ref() == "running" {
                pool.pause(id, PauseMode::Memory).await.expect("a pause");
                let sandbox = resume(&pool, id).await.expect("a resume");
                assert_eq!(sh(&sandbox, "cat /dev/shm/note").await, "running");
                kill(sandbox.pid);
                assert_eq!(ended.recv().await.expect("an end").id, *id);
            }
        }
        until("the warm slots of the killed server are gone", async || {
            (state.processes().len() == 1).then_some(())
        })
        .await;
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_a_pause_keeps_memory() {
    run(async {
        let state = State::new();
        let pool = open(&state, 1).await;
        let a = pool.create(spec()).await.expect("a sandbox");
        let script = "echo disk > /root/disk; echo memory > /dev/shm/memory; \
            (sleep 1000 & echo $!) > /run/pid 2>/dev/null; cat /proc/sys/kernel/random/boot_id";
        let boot_id = sh(&a, script).await;
        pool.pause(&a.id, PauseMode::Memory).await.expect("a pause");
        assert!(matches!(
            pool.pause(&a.id, PauseMode::Memory).await,
            Err(PoolError::Refused(_, Refusal::AlreadyPaused))
        ));
        assert!(matches!(
            pool.usage(&a.id).await,
            Err(PoolError::Refused(_, Refusal::NotRunning))
        ));
        assert_eq!(pool.stats().await.paused, 1);
        assert!(!state.processes().contains(&a.pid));
        for _ in 0..2 {
            let again = resume(&pool, &a.id).await.expect("a resume");
            assert!(again.id == a.id && again.pid != a.pid);
            let script = "cat /root/disk /dev/shm/memory; kill -0 $(cat /run/pid) && echo sleeps";
            assert_eq!(sh(&again, script).await, "disk\nmemory\nsleeps");
            assert_eq!(
                sh(&again, "cat /proc/sys/kernel/random/boot_id").await,
                boot_id
            );
            assert!(matches!(
                resume(&pool, &a.id).await,
                Err(PoolError::Refused(_, Refusal::AlreadyRunning))
            ));
            pool.pause(&a.id, PauseMode::Memory).await.expect("a pause");
        }
        pool.kill(&a.id).await.expect("a kill");
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_a_pause_without_memory_keeps_the_disk() {
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        let a = pool.create(spec()).await.expect("a sandbox");
        let script = "echo disk > /root/disk; echo memory > /dev/shm/memory; \
            cat /etc/machine-id; cat /proc/sys/kernel/random/boot_id";
        let before = sh(&a, script).await;
        let (machine, boot) = before.split_once('\n').expect("two lines");
        pool.pause(&a.id, PauseMode::FilesystemOnly)
            .await
            .expect("a pause");
        let again = resume(&pool, &a.id).await.expect("a resume");
        assert_eq!(sh(&again, "cat /root/disk; ls /dev/shm").await, "disk");
        assert_eq!(sh(&again, "cat /etc/machine-id").await, machine);
        assert_ne!(
            sh(&again, "cat /proc/sys/kernel/random/boot_id").await,
            boot
        );
        assert_eq!(sh(&again, "hostname").await, a.id.as_str());
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

/// Files are constantly replaced while the disk is copied. The copies are read on the host, in the state that a crash
/// would leave.
pub(crate) fn kvm_a_disk_without_memory_is_consistent() {
    // Without freezing, one of the first few copies would be inconsistent.
    const COPIES: u32 = 20;
    const WRITERS: &str = "mkdir -p /root/v; cd /root/v
        for w in 1 2 3 4; do setsid sh -c 'i=1000; while :; do
            i=$((i+1)); echo $i >$0.new && sync $0.new && mv $0.new $0; done' $w </dev/null >/dev/null 2>&1 &
        done
        for w in 1 2 3 4; do until [ -s $w ]; do sleep 0.01; done; done";
    let check = |layer: &Path| {
        for writer in 1..=4 {
            let read = format!("cat /upper/root/v/{writer}");
            let mut debugfs = Command::new("debugfs");
            let read = debugfs.arg("-R").arg(read).arg(layer).output();
            let read =
                String::from_utf8_lossy(&read.expect("debugfs is installed").stdout).into_owned();
            assert!(
                read.trim().parse::<u32>().is_ok_and(|v| v > 1000),
                "{read:?}"
            );
        }
    };
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        let a = pool.create(spec()).await.expect("a sandbox");
        sh(&a, WRITERS).await;
        // A write (splice(2), number 275) that never ends, which would block a freeze.
        const HELD: &str = "setsid python3 -c 'import os
r, w = os.pipe()
os.splice(r, os.open(\"/root/held\", os.O_CREAT | os.O_WRONLY), 1)' </dev/null >/dev/null 2>&1 &
            until grep -q ^275 /proc/$!/syscall; do sleep 0.01; done";
        sh(&a, HELD).await;
        for _ in 0..COPIES {
            let saved = pool.save_disk(&a.id).await.expect("a saved disk");
            check(&state.0.join(format!("templates/{}/image/layer", saved.id)));
            pool.remove_template(&saved.id).await.expect("a removal");
        }
        pool.pause(&a.id, PauseMode::FilesystemOnly)
            .await
            .expect("a pause");
        let paused = state.0.join("sandboxes").join(a.id.as_str());
        check(&paused.join("pause/layer"));
        pool.close(OnClose::Kill).await;
    });
}

/// A sandbox that was booted has no template as the base of a diff. The same holds for its pause and its forks, whose
/// files are removed once their VMs run.
pub(crate) fn kvm_files_that_are_removed_soon_are_no_base() {
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        let a = pool.create(spec()).await.expect("a sandbox");
        for mode in [PauseMode::FilesystemOnly, PauseMode::Memory] {
            pool.pause(&a.id, mode).await.expect("a pause");
            resume(&pool, &a.id).await.expect("a resume");
            pool.snapshot(&a.id, Vec::new()).await.expect("a snapshot");
        }
        let forks = pool.fork(&a.id, vec![spec()]).await.expect("forks");
        for fork in forks {
            let fork = fork.expect("a fork");
            for id in [&a.id, &fork.id] {
                let dir = state.0.join("sandboxes").join(id.as_str());
                let record = std::fs::read(dir.join("record.json")).expect("a record");
                let record: serde_json::Value = serde_json::from_slice(&record).expect("JSON");
                assert!(record["lineage"]["root"].is_string(), "{record}");
                assert!(record["lineage"]["home"].is_null(), "{record}");
            }
            pool.pause(&fork.id, PauseMode::Memory)
                .await
                .expect("a pause");
            resume(&pool, &fork.id).await.expect("a resume");
        }
        pool.close(OnClose::Kill).await;
    });
}

pub(crate) fn kvm_forks_continue_from_their_source() {
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        let source = pool.create(spec()).await.expect("a sandbox");
        sh(&source, "echo 1 > /dev/shm/n; echo 1 > /root/n").await;
        let forks = pool
            .fork(&source.id, vec![spec(); 10])
            .await
            .expect("forks");
        sh(&source, "echo 2 > /dev/shm/n; echo 2 > /root/n").await;
        let mut machines = vec![sh(&source, "cat /etc/machine-id").await];
        for fork in forks {
            let fork = fork.expect("a fork");
            assert_eq!(sh(&fork, "cat /dev/shm/n /root/n").await, "1\n1");
            assert_eq!(sh(&fork, "hostname").await, fork.id.as_str());
            machines.push(sh(&fork, "cat /etc/machine-id").await);
        }
        machines.sort();
        machines.dedup();
        assert_eq!(machines.len(), 11);
        // The snapshot of the forks is removed.
        until("the snapshot is removed", async || {
            let left = std::fs::read_dir(state.0.join("forks")).expect("a directory");
            (left.count() == 0).then_some(())
        })
        .await;
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_a_snapshot_is_a_template() {
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        let source = pool.create(spec()).await.expect("a sandbox");
        sh(&source, "echo kept > /root/kept").await;
        let names = vec!["mine:v1".to_owned()];
        let made = pool.snapshot(&source.id, names).await.expect("a snapshot");
        assert_eq!(made.kind, TemplateKind::Snapshot);
        sh(&source, "echo later > /root/kept").await;
        pool.pause(&source.id, PauseMode::Memory)
            .await
            .expect("a pause");
        let paused = pool
            .snapshot(&source.id, Vec::new())
            .await
            .expect("a snapshot");
        pool.kill(&source.id).await.expect("a kill");
        pool.close(OnClose::Kill).await;

        let pool = open(&state, 0).await;
        for (template, content) in [("mine:v1", "kept"), (paused.id.as_str(), "later")] {
            let mut spec = spec();
            spec.template = template.to_owned();
            let sandbox = pool.create(spec).await.expect("a sandbox");
            assert_eq!(sh(&sandbox, "cat /root/kept").await, content);
            assert_eq!(sh(&sandbox, "hostname").await, sandbox.id.as_str());
        }
        assert_eq!(pool.template("mine:v1").await.map(|t| t.id), Some(made.id));
        // Snapshots contain only the difference from the base.
        assert!(matches!(
            pool.remove_template("base").await,
            Err(PoolError::InUse(..))
        ));
        pool.remove_template("mine:v1").await.expect("a removal");
        assert!(pool.template("mine:v1").await.is_none());
        let mut gone = spec();
        gone.template = "mine:v1".into();
        assert!(matches!(
            pool.create(gone).await,
            Err(PoolError::NoTemplate(_))
        ));
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}
