//! Templates made from disks and from running sandboxes.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use model::Bytes;
use pool::{
    CreateSpec, DiskSpec, OnClose, PauseMode, Pool, PoolConfig, PoolError, Priority, Sandbox,
    TemplateDefaults, TemplateKind,
};

use super::{
    lifecycle::run,
    support::{State, config, exec, names, open, resume, sh, spec, until, variable},
};

/// The root image of the prepared guests.
pub(crate) fn root() -> PathBuf {
    variable("CUBE_ARTIFACTS").join("guest/base.erofs")
}

pub(crate) fn disk() -> DiskSpec {
    DiskSpec {
        root: root(),
        layer: None,
        memory: Bytes::mib(256),
        vcpus: 1,
    }
}

fn from(template: &str) -> CreateSpec {
    CreateSpec {
        template: template.to_owned(),
        ..spec()
    }
}

pub(crate) async fn create(pool: &Pool, template: &str) -> Sandbox {
    pool.create(from(template)).await.expect("a sandbox")
}

pub(crate) fn kvm_a_sandbox_boots_from_a_disk_and_the_disk_that_it_leaves_is_a_template() {
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        // The image may be removed once the template has been added.
        let image = state.0.join("root.erofs");
        if fs::hard_link(root(), &image).is_err() {
            fs::copy(root(), &image).expect("a copy");
        }
        let base = DiskSpec {
            root: image.clone(),
            ..disk()
        };
        let base = pool.add_disk(base).await.expect("a disk template");
        fs::remove_file(image).expect("the image");
        assert_eq!(
            (base.kind, base.source.as_ref()),
            (TemplateKind::Disk, None)
        );
        let first = create(&pool, &base.id).await;
        assert_eq!(sh(&first, "hostname").await, first.id.as_str());
        let boot = sh(&first, "cat /proc/sys/kernel/random/boot_id").await;
        sh(&first, "echo kept > /root/kept").await;
        let saved = pool.save_disk(&first.id).await.expect("a saved disk");
        assert_eq!(saved.source.as_ref(), Some(&first.id));
        assert!(
            saved.kind == TemplateKind::Disk && saved.bytes.0 > 0,
            "{saved:?}"
        );
        // The sandbox has continued, and its later work is not in the template.
        assert_eq!(
            sh(&first, "cat /proc/sys/kernel/random/boot_id").await,
            boot
        );
        sh(&first, "echo later > /root/kept").await;
        pool.kill(&first.id).await.expect("a kill");
        pool.close(OnClose::Kill).await;

        let pool = open(&state, 0).await;
        let second = create(&pool, &saved.id).await;
        assert_eq!(sh(&second, "cat /root/kept").await, "kept");
        let empty = create(&pool, &base.id).await;
        assert_eq!(sh(&empty, "ls /root").await, "");
        // A sandbox keeps the disk from which it was booted, and so do its pauses.
        for template in [&base.id, &saved.id] {
            pool.remove_template(template).await.expect("a removal");
            let gone = pool.create(from(template)).await;
            assert!(matches!(gone, Err(PoolError::NoTemplate(_))), "{gone:?}");
        }
        assert_eq!(sh(&second, "cat /root/kept").await, "kept");
        for mode in [PauseMode::FilesystemOnly, PauseMode::Memory] {
            pool.pause(&second.id, mode).await.expect("a pause");
            let again = resume(&pool, &second.id).await.expect("a resume");
            assert_eq!(sh(&again, "cat /root/kept").await, "kept");
        }
        let third = pool.save_disk(&second.id).await.expect("a saved disk");
        pool.close(OnClose::Kill).await;
        // Only the last template and its root image are left.
        let pool = open(&state, 0).await;
        until("unused images are removed", async || {
            let roots = names(&state.0.join("images")).into_iter();
            (roots.filter(|name| name.starts_with("root-")).count() == 1).then_some(())
        })
        .await;
        assert_eq!(names(&state.0.join("templates")), [third.id]);
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_a_published_process_runs_on_in_every_sandbox() {
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        let base = pool.disk_of("base").await.expect("the disk of base");
        let built = publish(&pool, &base.id, "first", &["mine", "mine:v1"]).await;
        pool.close(OnClose::Keep).await;

        let pool = open(&state, 0).await;
        let found = pool.template("mine:default").await.expect("it");
        assert_eq!((&found.id, found.kind), (&built, TemplateKind::Built));
        let [a, b] = [create(&pool, "mine").await, create(&pool, "mine:v1").await];
        for sandbox in [&a, &b] {
            runs_on(sandbox, "first").await;
            assert_eq!(sh(sandbox, "hostname").await, sandbox.id.as_str());
        }
        // Even without its memory, a sandbox has the template's defaults, and its disk can be the next template's.
        pool.pause(&a.id, PauseMode::FilesystemOnly)
            .await
            .expect("a pause");
        let cold = resume(&pool, &a.id).await.expect("a resume");
        assert_eq!(default_workdir(&cold).await, "/tmp");
        let next = pool.disk_of("mine").await.expect("its disk");
        assert_eq!(
            sh(&create(&pool, &next.id).await, "cat /root/of").await,
            "first"
        );
        // A snapshot of such a sandbox builds on the template.
        let snapshot = pool.snapshot(&b.id, Vec::new()).await.expect("a snapshot");
        let in_use = pool.remove_template(&built).await;
        assert!(matches!(in_use, Err(PoolError::InUse(..))), "{in_use:?}");
        let no_disk = pool.disk_of(&snapshot.id).await;
        assert!(matches!(no_disk, Err(PoolError::NoDisk(_))), "{no_disk:?}");
        let clone = create(&pool, &snapshot.id).await;
        runs_on(&clone, "first").await;
        assert_eq!(default_workdir(&clone).await, "/tmp");
        pool.remove_template(&snapshot.id).await.expect("a removal");
        // A running sandbox outlives its template.
        pool.remove_template(&built).await.expect("a removal");
        pool.pause(&b.id, PauseMode::Memory).await.expect("a pause");
        runs_on(&resume(&pool, &b.id).await.expect("a resume"), "first").await;
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_names_move_between_templates_and_a_build_has_a_low_priority() {
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        let base = pool.disk_of("base").await.expect("the disk of base");
        let first = publish(&pool, &base.id, "first", &["mine", "mine:v1"]).await;
        let second = publish(&pool, &base.id, "second", &["mine"]).await;
        pool.close(OnClose::Keep).await;
        let pool = open(&state, 0).await;
        let of = async |pool: &Pool, name: &str| pool.template(name).await.map(|t| t.id);
        assert_eq!(of(&pool, "mine").await.as_ref(), Some(&second));
        assert_eq!(of(&pool, "mine:v1").await.as_ref(), Some(&first));
        let tags = vec!["mine:default".to_owned(), "other".to_owned()];
        pool.name_template(&first, tags).await.expect("names");
        for refused in ["base", "a b"] {
            let names = vec!["free".to_owned(), refused.to_owned()];
            assert!(
                pool.name_template(&first, names).await.is_err(),
                "{refused}"
            );
        }
        assert!(
            pool.name_template("base", vec!["free".into()])
                .await
                .is_err()
        );
        let none = pool
            .unname_templates(vec!["other".into(), "none".into()])
            .await;
        assert!(matches!(none, Err(PoolError::NoTemplate(_))), "{none:?}");
        pool.unname_templates(vec!["mine:v1".into()])
            .await
            .expect("a name less");
        pool.close(OnClose::Keep).await;
        let pool = open(&state, 0).await;
        for (name, wanted) in [
            ("mine", Some(&first)),
            ("other", Some(&first)),
            ("mine:v1", None),
        ] {
            assert_eq!(of(&pool, name).await.as_ref(), wanted, "{name}");
        }
        assert!(pool.template("free").await.is_none());
        runs_on(&create(&pool, "other").await, "first").await;

        let background = CreateSpec {
            priority: Priority::Background,
            ..from(&base.id)
        };
        let build = pool.create(background).await.expect("a sandbox");
        let user = create(&pool, &base.id).await;
        assert_eq!(
            weight(&state, &build),
            weight(&state, &user).map(|w| w / 10)
        );
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_a_template_that_is_not_used_any_more_loses_its_warm_slots() {
    run(async {
        let state = State::new();
        // Long enough for a fill on a busy host.
        let idle = Duration::from_secs(8);
        let config = PoolConfig {
            idle,
            warm_slots: 2,
            ..config(&state.0, 1)
        };
        let (pool, ..) = Pool::open(config).await.expect("a pool");
        let base = pool.disk_of("base").await.expect("the disk of base");
        publish(&pool, &base.id, "first", &["mine"]).await;
        let warm = async |name: &str| pool.template(name).await.map_or(0, |t| t.warm);
        until("base is warm", async || {
            (warm("base").await == 1).then_some(())
        })
        .await;
        assert_eq!(warm("mine").await, 0, "warm slots of an unused template");
        for _ in 0..2 {
            let used = create(&pool, "mine").await;
            runs_on(&used, "first").await;
            until("it has warm slots", async || {
                (warm("mine").await == 1).then_some(())
            })
            .await;
            until("it has none", async || {
                (warm("mine").await == 0).then_some(())
            })
            .await;
            // The sandbox remains, and so does the warm stock of the installed template.
            runs_on(&used, "first").await;
            assert_eq!(warm("base").await, 1);
        }
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_a_disk_that_cannot_be_saved_costs_nothing() {
    run(async {
        let state = State::new();
        let pool = open(&state, 0).await;
        let base = pool.add_disk(disk()).await.expect("a disk template");
        let sandbox = create(&pool, &base.id).await;
        // A guest without the program.
        sh(&sandbox, "rm /bin/sync; echo here > /root/here").await;
        let failed = pool.save_disk(&sandbox.id).await.expect_err("no sync");
        assert!(failed.to_string().contains("sync in the guest"), "{failed}");
        let failed = pool.publish(
            &sandbox.id,
            vec!["mine".into()],
            TemplateDefaults::default(),
        );
        failed.await.expect_err("no sync");
        assert_eq!(sh(&sandbox, "cat /root/here").await, "here");
        assert!(pool.template("mine").await.is_none());
        // Wrong paths and impossible VM sizes are rejected as well.
        for wrong in [
            DiskSpec {
                root: "/no/such/image".into(),
                ..disk()
            },
            DiskSpec {
                root: state.0.clone(),
                ..disk()
            },
            DiskSpec {
                layer: Some("/no/such/layer".into()),
                ..disk()
            },
            DiskSpec {
                memory: Bytes::mib(1),
                ..disk()
            },
            DiskSpec { vcpus: 0, ..disk() },
        ] {
            let why = pool.add_disk(wrong.clone()).await.expect_err("a refusal");
            assert!(
                why.to_string().starts_with("add a disk template: "),
                "{wrong:?}: {why}"
            );
        }
        pool.pause(&sandbox.id, PauseMode::Memory)
            .await
            .expect("a pause");
        let paused = pool
            .save_disk(&sandbox.id)
            .await
            .expect_err("it does not run");
        assert!(matches!(paused, PoolError::Refused(..)), "{paused}");
        pool.kill(&sandbox.id).await.expect("a kill");
        until("nothing is left of them", async || {
            let left = names(&state.0.join("templates"));
            (left == [base.id.clone()]).then_some(())
        })
        .await;
        pool.close(OnClose::Kill).await;

        // Without room for it, nothing is written.
        let mut full = config(&state.0, 0);
        full.disk_reserve = Bytes(u64::MAX / 2);
        let (pool, ..) = Pool::open(full).await.expect("a pool");
        let other = Path::new("/dev/shm/cube-pool-root");
        fs::write(other, "a root image").expect("a file");
        let refused = pool
            .add_disk(DiskSpec {
                root: other.into(),
                ..disk()
            })
            .await;
        fs::remove_file(other).expect("the file");
        assert!(matches!(refused, Err(PoolError::NoSpace(_))), "{refused:?}");
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_a_built_template_has_the_memory_that_its_disk_was_booted_with_and_a_working_set()
{
    run(async {
        let state = State::new();
        // One slot belongs to `base`.
        let config = PoolConfig {
            warm_slots: 2,
            ..config(&state.0, 1)
        };
        let (pool, ..) = Pool::open(config).await.expect("a pool");
        let recipe = pool.recipe("base").await.expect("it").expect("a recipe");
        let base = pool.disk_of("base").await.expect("the disk of base");
        assert_eq!(base.memory, recipe.memory);
        assert_eq!(pool.recipe(&base.id).await.expect("no error"), None);
        let large = Bytes(base.memory.0 + (128 << 20));
        let large = pool.disk_of_size(&base.id, large, base.disk);
        let large = large.await.expect("it");
        let built = publish(&pool, &large.id, "first", &["mine"]).await;
        let info = pool.template(&built).await.expect("it");
        assert_eq!(info.memory, large.memory);
        let background = CreateSpec {
            priority: Priority::Background,
            ..from(&built)
        };
        let clone = pool.create(background).await.expect("a sandbox");
        let total: u64 = sh(&clone, "grep -o '[0-9]*' /proc/meminfo | head -1")
            .await
            .parse()
            .expect("a number");
        assert!(total << 10 > base.memory.0, "{total} KiB");
        pool.record_working_set(&clone.id).await.expect("a record");
        let file = state
            .0
            .join("templates")
            .join(&built)
            .join("image/working-set");
        assert!(fs::metadata(file).expect("a file").len() > 0);
        let used = pool.template(&built).await.expect("it");
        assert_eq!((used.spawned, used.warm), (0, 0), "not a use of it");
        let other = create(&pool, &base.id).await;
        let refused = pool.record_working_set(&other.id).await;
        assert!(
            matches!(refused, Err(PoolError::NoTemplate(_))),
            "{refused:?}"
        );
        // With it, clones start as before, including warm ones.
        runs_on(&create(&pool, "mine").await, "first").await;
        until("it has warm slots", async || {
            let mine = pool.template("mine").await.expect("it");
            (mine.warm == 1).then_some(())
        })
        .await;
        runs_on(&create(&pool, "mine").await, "first").await;
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

/// Publishes a template whose process counts in a file in memory. Returns its id.
pub(crate) async fn publish(pool: &Pool, base: &str, text: &str, names: &[&str]) -> String {
    let build = create(pool, base).await;
    let count = "n=0; while true; do n=$((n+1)); echo $n > /dev/shm/count; sleep 0.1; done";
    sh(&build, &format!("echo {text} | tee /dev/shm/of > /root/of")).await;
    sh(
        &build,
        &format!("({count}) > /dev/null 2>&1 < /dev/null & disown"),
    )
    .await;
    let defaults = TemplateDefaults {
        user: Some("root".into()),
        workdir: Some("/tmp".into()),
        env: [("CUBE_OF_TEMPLATE".to_owned(), "1".to_owned())].into(),
    };
    let names = names.iter().map(ToString::to_string).collect();
    let built = pool
        .publish(&build.id, names, defaults)
        .await
        .expect("a template");
    runs_on(&build, text).await;
    pool.kill(&build.id).await.expect("a kill");
    built.id
}

/// Checks that the process continues to count, and that the sandbox has the template's defaults.
pub(crate) async fn runs_on(sandbox: &Sandbox, text: &str) {
    assert_eq!(
        sh(sandbox, "cat /dev/shm/of /root/of").await,
        format!("{text}\n{text}")
    );
    let count = "cat /dev/shm/count";
    let before = sh(sandbox, count).await;
    until("the process counts", async || {
        (sh(sandbox, count).await != before).then_some(())
    })
    .await;
}

async fn default_workdir(sandbox: &Sandbox) -> String {
    let sandbox = sandbox.clone();
    let pwd = tokio::task::spawn_blocking(move || exec(&sandbox, None, "pwd"));
    let out = pwd.await.expect("a command").stdout;
    String::from_utf8_lossy(&out).trim().to_owned()
}

/// The CPU weight or shares of a sandbox's cgroup, if the host has them.
fn weight(state: &State, sandbox: &Sandbox) -> Option<u64> {
    let groups = state.groups().into_iter();
    let mut own = groups.filter(|group| group.ends_with(sandbox.id.as_str()));
    own.find_map(|group| {
        let read = |name| fs::read_to_string(group.join(name)).ok();
        let text = read("cpu.weight").or_else(|| read("cpu.shares"))?;
        text.trim().parse::<u64>().ok()
    })
}
