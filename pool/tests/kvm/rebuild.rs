//! Installed templates are rebuilt in the background after an upgrade of the VMM or of the guest's files.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use model::{Bytes, GuestPaths, MANIFEST_NAME};
use pool::{OnClose, PauseMode, Pool, PoolConfig, PoolStats, RebuildState, Sandbox, WarmMarks};
use template::{Builder, Limits, Recipe, Work};

use super::{
    lifecycle::run,
    support::{SERVER, State, UPGRADED, resume, sh, spec, until, until_within, variable},
    upgrade::{kept, read, release, runs_in, vmm_of, write},
};

/// Long, because rebuilds get only spare CPU time.
const LOW_PRIORITY: Duration = Duration::from_secs(600);
const GUEST: [&str; 4] = ["vmlinux", "initramfs.cpio", "base.erofs", "layer.ext4"];

/// Builds the template `base` with the VMM of release 0, from files in `guest` of the state directory.
fn install(state: &Path) {
    let (guest, installed) = (state.join("guest"), state.join("installed"));
    for dir in [&guest, &installed] {
        fs::create_dir_all(dir).expect("a directory");
    }
    for name in GUEST {
        let made = variable("CUBE_ARTIFACTS").join("guest").join(name);
        fs::hard_link(made, guest.join(name)).expect("a link");
    }
    let [kernel, initrd, root, layer] = GUEST.map(|name| guest.join(name));
    let paths = GuestPaths {
        kernel,
        initrd,
        root,
        layer,
    };
    let recipe = Recipe {
        first: vec![Work::run(&["/bin/true"])],
        ..Recipe::of(&paths, Bytes::mib(256)).expect("the files")
    };
    let vmm = vmm_of(0);
    let builder = Builder {
        vmm: &vmm,
        run: state,
        log: &state.join("build.log"),
        limits: Limits::default(),
    };
    let base = installed.join("base");
    builder
        .build(&recipe, None, &base, &|_| Ok(()))
        .expect("a template");
    fs::copy(vmm, base.join("cube-vmm")).expect("a copy");
}

/// Opens the pool with release `n`.
async fn open(state: &State, n: u32, warm: u32) -> Pool {
    let config = PoolConfig {
        warm: WarmMarks {
            low: warm,
            high: warm,
        },
        warm_slots: warm,
        ..release(&state.0, n)
    };
    let (pool, recovered, _) = Pool::open(config).await.expect("a pool");
    assert_eq!(recovered.lost, []);
    pool
}

async fn create(pool: &Pool) -> Sandbox {
    pool.create(spec()).await.expect("a sandbox")
}

/// Waits until the template has this state.
async fn until_it_is(pool: &Pool, state: RebuildState) -> PoolStats {
    until_within(
        LOW_PRIORITY,
        &format!("the template is {state:?}"),
        async || {
            let stats = pool.stats().await;
            (stats.installed["base"].state == state).then_some(stats)
        },
    )
    .await
}

/// The directories of complete templates.
fn images(state: &State) -> Vec<PathBuf> {
    let entries = fs::read_dir(state.0.join("images")).expect("images");
    let paths = entries.map(|e| e.expect("an entry").path());
    paths
        .filter(|path| path.join(MANIFEST_NAME).exists())
        .collect()
}

pub(crate) fn kvm_an_installed_template_is_rebuilt_after_an_upgrade() {
    run(async {
        let state = State::new();
        install(&state.0);
        let pool = open(&state, 0, 0).await;
        let stats = until_it_is(&pool, RebuildState::Current).await;
        assert_eq!((stats.rebuilt, stats.images), (0, 1));
        let running = create(&pool).await;
        write(&running, "running").await;
        let paused = create(&pool).await;
        write(&paused, "paused").await;
        pool.pause(&paused.id, PauseMode::Memory)
            .await
            .expect("a pause");
        pool.snapshot(&running.id, vec!["snap".into()])
            .await
            .expect("a snapshot");
        let vmm0 = runs_in(&running);
        pool.close(OnClose::Keep).await;

        // Sandboxes start immediately, before and during the rebuild, in the old VMM.
        let pool = open(&state, 1, 1).await;
        let new = create(&pool).await;
        assert_eq!(runs_in(&new), vmm0);
        pool.kill(&new.id).await.expect("a kill");
        until_it_is(&pool, RebuildState::Running).await;
        let new = create(&pool).await;
        assert_eq!(sh(&new, "echo fine").await, "fine");
        let during = pool.stats().await;
        assert_eq!((during.rebuilt, runs_in(&new)), (0, vmm0.clone()));
        pool.kill(&new.id).await.expect("a kill");
        let stats = until_it_is(&pool, RebuildState::Current).await;
        assert_eq!(
            (stats.rebuilt, stats.rebuilds_failed, stats.images),
            (1, 0, 2)
        );
        let vmm1 = stats.installed["base"].vmm.to_string();
        assert_ne!(vmm1, vmm0);

        // The old template still exists for sandboxes that are based on it.
        assert_eq!(read(&running).await, "running");
        pool.pause(&running.id, PauseMode::Memory)
            .await
            .expect("a pause");
        for (id, value) in [(&running.id, "running"), (&paused.id, "paused")] {
            let back = resume(&pool, id).await.expect("a resume");
            assert_eq!(
                (read(&back).await.as_str(), runs_in(&back)),
                (value, vmm0.clone())
            );
        }
        // A diff of the rebuilt template.
        let new = create(&pool).await;
        write(&new, "new").await;
        pool.pause(&new.id, PauseMode::Memory)
            .await
            .expect("a pause");
        let new = resume(&pool, &new.id).await.expect("a resume");
        assert_eq!(
            (read(&new).await.as_str(), runs_in(&new)),
            ("new", vmm1.clone())
        );
        pool.kill(&new.id).await.expect("a kill");

        // The old template and its VMM are removed after the last sandbox that needs them.
        for id in [&running.id, &paused.id] {
            pool.kill(id).await.expect("a kill");
        }
        assert!(kept(&state).contains(&vmm0));
        pool.remove_template("snap").await.expect("a removal");
        until("only the present VMM and template are kept", async || {
            (kept(&state) == [vmm1.clone()].into() && images(&state).len() == 1).then_some(())
        })
        .await;
        pool.close(OnClose::Keep).await;

        // The next server continues with the rebuilt template. A server with the old VMM uses the installed one.
        for (n, vmm) in [(1, &vmm1), (0, &vmm0)] {
            let pool = open(&state, n, 0).await;
            let new = create(&pool).await;
            assert_eq!(&runs_in(&new), vmm);
            let stats = until_it_is(&pool, RebuildState::Current).await;
            assert_eq!(stats.rebuilt, 0);
            pool.close(OnClose::Kill).await;
        }
        state.assert_clean();
    });
}

pub(crate) fn kvm_a_changed_guest_file_makes_a_new_template_and_a_missing_one_none() {
    run(async {
        let state = State::new();
        install(&state.0);
        let initrd = state.0.join("guest/initramfs.cpio");
        let pool = open(&state, 0, 0).await;
        until_it_is(&pool, RebuildState::Current).await;
        pool.close(OnClose::Kill).await;

        // Zeros after an archive change nothing but its checksum.
        let mut bytes = fs::read(&initrd).expect("the initramfs");
        bytes.extend([0; 4096]);
        let replace = |bytes: &[u8]| {
            let new = initrd.with_extension("new");
            fs::write(&new, bytes).expect("a file");
            fs::rename(new, &initrd).expect("a rename");
        };
        replace(&bytes);
        let pool = open(&state, 0, 0).await;
        let stats = until_it_is(&pool, RebuildState::Current).await;
        assert_eq!(stats.rebuilt, 1);
        until("the former template is removed", async || {
            (images(&state).len() == 1).then_some(())
        })
        .await;
        let linked = images(&state)[0].join("initramfs.cpio");
        assert!(
            fs::read(linked).expect("the initramfs") == bytes,
            "it is the former one"
        );
        let new = create(&pool).await;
        assert_eq!(sh(&new, "echo fine").await, "fine");
        pool.close(OnClose::Kill).await;

        // The kernel does not boot: the old template stays in use, and the failure is counted.
        let kernel = state.0.join("guest/vmlinux");
        fs::rename(&kernel, kernel.with_extension("good")).expect("a rename");
        fs::write(&kernel, "not a kernel").expect("a file");
        let pool = open(&state, 0, 0).await;
        let stats = until_it_is(&pool, RebuildState::Failed).await;
        assert_eq!((stats.rebuilt, stats.rebuilds_failed), (0, 1));
        let new = create(&pool).await;
        assert_eq!(sh(&new, "echo fine").await, "fine");
        // It is not retried immediately.
        let later = pool.stats().await;
        assert_eq!(later.rebuilds_failed, 1);
        pool.close(OnClose::Kill).await;

        fs::remove_file(&kernel).expect("a removal");
        let pool = open(&state, 1, 0).await;
        let stats = until_it_is(&pool, RebuildState::Kept).await;
        assert_eq!((stats.rebuilt, stats.rebuilds_failed), (0, 0));
        let new = create(&pool).await;
        assert_eq!(sh(&new, "echo fine").await, "fine");
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

/// A server of release 1 that only opens its pool.
fn server(state: &State) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .env(SERVER, &state.0)
        .env(UPGRADED, "1")
        .stdin(Stdio::null())
        .spawn()
        .expect("a server")
}

pub(crate) fn kvm_an_interrupted_rebuild_is_started_again() {
    run(async {
        let state = State::new();
        install(&state.0);
        let pool = open(&state, 0, 0).await;
        let running = create(&pool).await;
        write(&running, "running").await;
        pool.close(OnClose::Keep).await;
        let draft = state.0.join("images/.new-rebuild");
        // The server is killed while its files are linked, its guest boots, its snapshot is complete, or its first
        // clone runs.
        for step in ["vmlinux", "boot.sock", "image", "restore.sock"] {
            let mut server = server(&state);
            let exists = async || draft.join(step).exists().then_some(());
            until_within(LOW_PRIORITY, step, exists).await;
            server.kill().expect("a kill");
            server.wait().expect("its end");
            assert!(images(&state).len() == 1, "{step}");
            let is_alive = |pid: &u32| Path::new(&format!("/proc/{pid}")).exists();
            until("its VM has ended", async || {
                let vms = state.rebuilds();
                (!vms.iter().any(is_alive)).then_some(())
            })
            .await;
        }
        // A server that stops ends the rebuild, and waits for its end.
        let pool = open(&state, 1, 0).await;
        until("a guest boots", async || {
            draft.join("boot.sock").exists().then_some(())
        })
        .await;
        let closed = tokio::time::timeout(Duration::from_secs(30), pool.close(OnClose::Keep));
        closed.await.expect("an end of the rebuild");
        assert_eq!(state.rebuilds(), Vec::<u32>::new());
        assert_eq!(images(&state).len(), 1);

        let pool = open(&state, 1, 0).await;
        let stats = until_it_is(&pool, RebuildState::Current).await;
        assert_eq!((stats.rebuilt, stats.rebuilds_failed), (1, 0));
        assert!(!draft.exists());
        assert_eq!(read(&running).await, "running");
        let new = create(&pool).await;
        assert_ne!(runs_in(&new), runs_in(&running));
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}
