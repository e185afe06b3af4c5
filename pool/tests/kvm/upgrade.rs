//! Upgrades: everything that users have under one release remains usable under the next two, whose VMMs read different
//! formats.
//!
//! The releases are the real `cube-vmm` and two builds of it with later template formats (`CUBE_LATER_VMMS`), which
//! refuse each other's snapshots.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use model::{MANIFEST_NAME, SandboxId, template_file};
use pool::{OnClose, PauseMode, Pool, PoolConfig, Sandbox, SandboxState};

use super::{
    lifecycle::run,
    support::{SERVER, State, UPGRADED, config, resume, sh, spec, until, variable},
};

/// The VMM of release `n`: 0 is the real one.
pub(crate) fn vmm_of(n: u32) -> PathBuf {
    if n == 0 {
        return variable("CUBE_BIN").join("cube-vmm");
    }
    let vmm = variable("CUBE_LATER_VMMS").join(format!("{n}/cube-vmm"));
    let cure = "CUBE_LATER_VMMS must name target/cube/later-vmms, which `cargo xtask test` builds";
    assert!(vmm.is_file(), "{} is missing: {cure}", vmm.display());
    vmm
}

/// The configuration of release `n`.
pub(crate) fn release(state: &Path, n: u32) -> PoolConfig {
    PoolConfig {
        vmm: vmm_of(n),
        images: vec![state.join("guest")],
        ..config(state, 0)
    }
}

/// Opens the pool with release `n`. All of `alive` must still exist.
async fn open(state: &State, n: u32, alive: &[&SandboxId]) -> Pool {
    let (pool, recovered, _) = Pool::open(release(&state.0, n)).await.expect("a pool");
    assert_eq!(recovered.lost, []);
    let found: BTreeSet<_> = recovered.alive.iter().map(|s| &s.id).collect();
    assert_eq!(found, alive.iter().copied().collect());
    pool
}

/// Installs the template `base` in a way that can be reverted: its own manifest, which names a root image in `guest`,
/// and links to all other files.
fn install_base(state: &Path) {
    let artifacts = variable("CUBE_ARTIFACTS");
    let (made, guest) = (artifacts.join("templates/base"), state.join("guest"));
    let base = state.join("installed/base");
    for dir in [&base, &guest] {
        fs::create_dir_all(dir).expect("a directory");
    }
    for name in [
        template_file::MEMORY,
        template_file::STATE,
        template_file::LAYER,
        template_file::WORKING_SET,
    ] {
        fs::hard_link(made.join(name), base.join(name)).expect("a link");
    }
    let text = fs::read_to_string(made.join(MANIFEST_NAME)).expect("a manifest");
    let mut manifest: serde_json::Value = serde_json::from_str(&text).expect("a manifest");
    let root = PathBuf::from(manifest["root"].as_str().expect("a root image"));
    let here = guest.join("root.erofs");
    fs::hard_link(&root, &here).expect("a link");
    for name in ["vmlinux", "initramfs.cpio"] {
        fs::hard_link(root.with_file_name(name), guest.join(name)).expect("a link");
    }
    manifest["root"] = here.to_str().expect("a path").into();
    fs::write(base.join(MANIFEST_NAME), manifest.to_string()).expect("a manifest");
    // Like any installed template, it carries the VMM that made it.
    fs::copy(vmm_of(0), base.join("cube-vmm")).expect("a copy");
}

/// The VMM that a sandbox runs in, as the SHA-256 in the path of its program.
pub(crate) fn runs_in(sandbox: &Sandbox) -> String {
    let program = fs::read_link(format!("/proc/{}/exe", sandbox.pid)).expect("a program");
    let dir = program.parent().and_then(Path::file_name);
    dir.expect("a kept VMM").to_string_lossy().into_owned()
}

pub(crate) fn kept(state: &State) -> BTreeSet<String> {
    let entries = fs::read_dir(state.0.join("vmms")).expect("kept VMMs");
    let name = |e: fs::DirEntry| e.file_name().to_string_lossy().into_owned();
    entries.map(|e| name(e.expect("an entry"))).collect()
}

async fn create(pool: &Pool, template: &str) -> Sandbox {
    let mut spec = spec();
    spec.template = template.to_owned();
    pool.create(spec).await.expect("a sandbox")
}

/// Writes a value to memory, which a cold boot loses, and one to the disk.
pub(crate) async fn write(sandbox: &Sandbox, value: &str) {
    sh(
        sandbox,
        &format!("echo {value} >/dev/shm/v; echo {value} >/root/v"),
    )
    .await;
}

pub(crate) async fn read(sandbox: &Sandbox) -> String {
    sh(sandbox, "cat /dev/shm/v").await
}

async fn fork(pool: &Pool, id: &SandboxId) -> Sandbox {
    let mut forks = pool.fork(id, vec![spec()]).await.expect("a fork");
    forks.pop().expect("one").expect("a fork")
}

pub(crate) fn kvm_an_upgrade_keeps_what_users_have() {
    run(async {
        let state = State::new();
        install_base(&state.0);

        // Release 0.
        let pool = open(&state, 0, &[]).await;
        let running = create(&pool, "base").await;
        write(&running, "running").await;
        let vmm0 = runs_in(&running);
        let paused = create(&pool, "base").await;
        write(&paused, "paused").await;
        pool.pause(&paused.id, PauseMode::Memory)
            .await
            .expect("a pause");
        let on_disk = create(&pool, "base").await;
        write(&on_disk, "disk").await;
        pool.pause(&on_disk.id, PauseMode::FilesystemOnly)
            .await
            .expect("a pause");
        pool.snapshot(&running.id, vec!["snap".into()])
            .await
            .expect("a snapshot");
        // As in a planned restart. Before the other restarts below, the server ended.
        pool.close(OnClose::HandOver).await;
        let all = [&running.id, &paused.id, &on_disk.id];

        // Release 1: everything continues in its own VMM, and a cold boot uses the new one.
        let pool = open(&state, 1, &all).await;
        assert_eq!(read(&running).await, "running");
        let forked = fork(&pool, &running.id).await;
        assert_eq!(read(&forked).await, "running");
        assert_eq!(runs_in(&forked), vmm0);
        pool.pause(&running.id, PauseMode::Memory)
            .await
            .expect("a pause");
        let running = resume(&pool, &running.id).await.expect("a resume");
        assert_eq!(
            (read(&running).await, runs_in(&running)),
            ("running".into(), vmm0.clone())
        );
        let paused = resume(&pool, &paused.id).await.expect("a resume");
        assert_eq!(
            (read(&paused).await, runs_in(&paused)),
            ("paused".into(), vmm0.clone())
        );
        for template in ["base", "snap"] {
            let new = create(&pool, template).await;
            assert_eq!(runs_in(&new), vmm0, "{template}");
            pool.kill(&new.id).await.expect("a kill");
        }
        let on_disk = resume(&pool, &on_disk.id).await.expect("a resume");
        assert_eq!(sh(&on_disk, "cat /root/v").await, "disk");
        let vmm1 = runs_in(&on_disk);
        assert_ne!(vmm1, vmm0);
        write(&on_disk, "release 1").await;
        let snap1 = pool
            .snapshot(&on_disk.id, vec!["snap1".into()])
            .await
            .expect("a snapshot");
        assert_eq!(snap1.vmm.expect("its VMM").as_str(), vmm1);
        for id in [&paused.id, &on_disk.id] {
            pool.pause(id, PauseMode::Memory).await.expect("a pause");
        }
        let stats = pool.stats().await;
        let uses: Vec<_> = stats
            .vmms
            .iter()
            .map(|(id, uses)| {
                (
                    id.as_str() == vmm1,
                    uses.is_present,
                    uses.running,
                    uses.paused,
                    uses.templates,
                )
            })
            .collect();
        let mut want = [(true, true, 0, 1, 1), (false, false, 2, 1, 2)];
        want.sort_by_key(|(is_1, ..)| if *is_1 { &vmm1 } else { &vmm0 });
        assert_eq!(uses, want);
        pool.close(OnClose::Keep).await;
        let all = [&running.id, &paused.id, &on_disk.id, &forked.id];

        // Release 2. The templates of release 0 are no longer installed.
        for dir in ["installed/base", "guest"] {
            fs::remove_dir_all(state.0.join(dir)).expect("a removal");
        }
        for dir in ["installed", "guest"] {
            fs::create_dir_all(state.0.join(dir)).expect("a directory");
        }
        let pool = open_without_base(&state, 2, &all).await;
        assert_eq!(read(&running).await, "running");
        let again = fork(&pool, &forked.id).await;
        assert_eq!(
            (read(&again).await, runs_in(&again)),
            ("running".into(), vmm0.clone())
        );
        for (sandbox, value, vmm) in [(&paused, "paused", &vmm0), (&on_disk, "release 1", &vmm1)] {
            let sandbox = resume(&pool, &sandbox.id).await.expect("a resume");
            assert_eq!(
                (read(&sandbox).await.as_str(), &runs_in(&sandbox)),
                (value, vmm)
            );
        }
        for (template, value, vmm) in [("snap", "running", &vmm0), ("snap1", "release 1", &vmm1)] {
            let new = create(&pool, template).await;
            assert_eq!((read(&new).await.as_str(), &runs_in(&new)), (value, vmm));
            pool.kill(&new.id).await.expect("a kill");
        }
        // Paused with its disk only, a sandbox leaves the VMM of release 0.
        pool.pause(&paused.id, PauseMode::FilesystemOnly)
            .await
            .expect("a pause");
        let paused = resume(&pool, &paused.id).await.expect("a resume");
        let vmm2 = runs_in(&paused);
        assert!(vmm2 != vmm0 && vmm2 != vmm1);
        let three = [&vmm0, &vmm1, &vmm2].map(String::clone);
        assert_eq!(kept(&state), three.into());

        // A VMM is removed after the last sandbox or template that needs it.
        for id in [&running.id, &forked.id, &again.id] {
            pool.kill(id).await.expect("a kill");
        }
        pool.remove_template("snap").await.expect("a removal");
        until("the VMM of release 0 is removed", async || {
            (!kept(&state).contains(&vmm0)).then_some(())
        })
        .await;
        assert!(kept(&state).contains(&vmm1));
        pool.remove_template("snap1").await.expect("a removal");
        for id in [&on_disk.id, &paused.id] {
            pool.kill(id).await.expect("a kill");
        }
        until("only the present VMM is kept", async || {
            (kept(&state) == [vmm2.clone()].into()).then_some(())
        })
        .await;
        until("no image is kept", async || {
            let images = fs::read_dir(state.0.join("images")).expect("images");
            (images.count() == 0).then_some(())
        })
        .await;
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

/// Like [`open`], without the installed template `base`.
async fn open_without_base(state: &State, n: u32, alive: &[&SandboxId]) -> Pool {
    let installed = state.0.join("without-base");
    fs::create_dir_all(&installed).expect("a directory");
    let config = PoolConfig {
        installed_templates: Some(installed),
        ..release(&state.0, n)
    };
    let (pool, recovered, _) = Pool::open(config).await.expect("a pool");
    assert_eq!(recovered.lost, []);
    assert_eq!(recovered.alive.len(), alive.len());
    pool
}

/// Opens the pool with the VMM of release 1, until this process is killed.
pub(crate) fn be_opening(state: &Path) {
    run(async {
        let _opened = Pool::open(release(state, 1)).await;
        std::future::pending::<()>().await;
    });
}

pub(crate) fn kvm_an_interrupted_upgrade_is_harmless() {
    run(async {
        let state = State::new();
        install_base(&state.0);
        let pool = open(&state, 0, &[]).await;
        let running = create(&pool, "base").await;
        write(&running, "running").await;
        let paused = create(&pool, "base").await;
        write(&paused, "paused").await;
        pool.pause(&paused.id, PauseMode::Memory)
            .await
            .expect("a pause");
        pool.close(OnClose::Keep).await;
        let all = [&running.id, &paused.id];
        for milliseconds in [2, 5, 10, 15, 20, 30, 50, 100] {
            let mut server = Command::new(std::env::current_exe().expect("this program"))
                .env(SERVER, &state.0)
                .env(UPGRADED, "1")
                .stdin(Stdio::null())
                .spawn()
                .expect("a server");
            tokio::time::sleep(Duration::from_millis(milliseconds)).await;
            server.kill().expect("a kill");
            server.wait().expect("its end");
        }
        // Release 0 again, then release 1.
        for n in [0, 1] {
            let pool = open(&state, n, &all).await;
            assert_eq!(read(&running).await, "running");
            let back = resume(&pool, &paused.id).await.expect("a resume");
            assert_eq!(read(&back).await, "paused");
            pool.pause(&paused.id, PauseMode::Memory)
                .await
                .expect("a pause");
            pool.close(OnClose::Keep).await;
        }

        // A later release has used the directory: this one refuses it, and removes nothing.
        let version = state.0.join("version.json");
        let before = fs::read(&version).expect("the version");
        fs::write(&version, r#"{"version":1000,"release":"9.9"}"#).expect("a write");
        let why = Pool::open(release(&state.0, 1))
            .await
            .expect_err("a refusal")
            .to_string();
        assert!(
            why.contains("release 9.9") && why.contains("start that release"),
            "{why}"
        );
        fs::write(&version, before).expect("a write");
        // The same if only a record was written by a later release.
        let record = state
            .0
            .join("sandboxes")
            .join(paused.id.as_str())
            .join("record.json");
        let before = fs::read_to_string(&record).expect("a record");
        let mut json: serde_json::Value = serde_json::from_str(&before).expect("a record");
        json["version"] = 1000.into();
        fs::write(&record, json.to_string()).expect("a write");
        let why = Pool::open(release(&state.0, 1))
            .await
            .expect_err("a refusal")
            .to_string();
        assert!(why.contains("has version 1000"), "{why}");
        fs::write(&record, before).expect("a write");
        let pool = open(&state, 1, &all).await;
        assert_eq!(read(&running).await, "running");
        let listed = pool.list().await.expect("sandboxes");
        let is_paused = |s: &Sandbox| s.state == SandboxState::Paused(PauseMode::Memory);
        assert_eq!(listed.iter().filter(|s| is_paused(s)).count(), 1);
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}
