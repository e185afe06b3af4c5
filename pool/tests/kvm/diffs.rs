//! Templates whose memory is stored as a diff.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use pool::{DiskSpec, OnClose, PauseMode, Pool, PoolConfig, TemplateInfo};

use super::{
    lifecycle::run,
    support::{State, config, names, resume, spec, until, until_within},
    templates::{create, disk, publish, root, runs_on},
};

async fn open(state: &State) -> Pool {
    let config = PoolConfig {
        // Long enough for a fill on a busy host.
        idle: Duration::from_secs(8),
        warm_slots: 2,
        ..config(&state.0, 0)
    };
    Pool::open(config).await.expect("a pool").0
}

fn image(state: &State, template: &str) -> PathBuf {
    state.0.join("templates").join(template).join("image")
}

fn space(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.blocks() * 512)
}

/// Waits until the memory of a template is stored as a diff only.
async fn until_stored(state: &State, template: &str) {
    let image = image(state, template);
    // An unoptimized build deflates slowly.
    let patience = Duration::from_secs(300);
    until_within(patience, "only the diff stays", async || {
        let is_stored = image.join("memory.diff").exists();
        (is_stored && !image.join("memory").exists() && !image.join("memory.old").exists())
            .then_some(())
    })
    .await;
}

/// Adds a disk template with its own root image.
async fn own_disk(pool: &Pool, state: &State) -> TemplateInfo {
    let own = state.0.join("root.erofs");
    if fs::hard_link(root(), &own).is_err() {
        fs::copy(root(), &own).expect("a copy");
    }
    let own = DiskSpec {
        root: own,
        ..disk()
    };
    pool.add_disk(own).await.expect("a disk template")
}

pub(crate) fn kvm_a_template_stored_as_a_diff_serves_sandboxes_and_survives_a_restart() {
    run(async {
        let state = State::new();
        let pool = open(&state).await;
        // One template has the root image of the installed template, the other has its own.
        let origin = pool.disk_of("base").await.expect("the disk of base");
        let own = own_disk(&pool, &state).await;
        let mut built = Vec::new();
        for (disk, text) in [(&origin.id, "first"), (&own.id, "second")] {
            let id = publish(&pool, disk, text, &[text]).await;
            built.push((id.clone(), space(&image(&state, &id).join("memory"))));
        }
        let paused = create(&pool, "first").await;
        let pause = pool.pause(&paused.id, PauseMode::Memory);
        pause.await.expect("a pause");
        for (id, whole) in &built {
            until_stored(&state, id).await;
            let diff = space(&image(&state, id).join("memory.diff"));
            println!("memory of {whole} bytes is stored as a diff of {diff} bytes");
            assert!(diff > 0 && diff * 10 < whole * 6, "{diff} of {whole}");
            let info = pool.template(id).await.expect("it");
            assert!(info.bytes.0 < *whole, "{info:?}");
        }
        let stats = pool.stats().await;
        assert_eq!(stats.memory_diffs, 2);
        assert!(stats.memory_diff_bytes < stats.memory_diff_memory_bytes);

        let begun = Instant::now();
        let first = create(&pool, "first").await;
        println!("a create took {:?}", begun.elapsed());
        runs_on(&first, "first").await;
        runs_on(&resume(&pool, &paused.id).await.expect("it"), "first").await;
        until("it is loaded into huge pages", async || {
            let stats = pool.stats().await;
            stats.stocks.get("first")?.is_loaded.then_some(())
        })
        .await;
        runs_on(&create(&pool, "first").await, "first").await;
        pool.pause(&paused.id, PauseMode::Memory)
            .await
            .expect("a pause");
        pool.close(OnClose::Keep).await;

        // The next server finds running sandboxes of the template, whose memory file it removes.
        let pool = open(&state).await;
        assert!(!image(&state, &built[0].0).join("memory").exists());
        runs_on(&first, "first").await;
        let fork = pool.fork(&first.id, vec![spec()]).await;
        for fork in fork.expect("a fork") {
            runs_on(&fork.expect("a sandbox"), "first").await;
        }
        pool.pause(&first.id, PauseMode::Memory)
            .await
            .expect("a pause");
        for id in [&first.id, &paused.id] {
            runs_on(&resume(&pool, id).await.expect("a resume"), "first").await;
        }
        runs_on(&create(&pool, "second").await, "second").await;
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_the_base_of_a_diff_stays_as_long_as_the_diff() {
    run(async {
        let state = State::new();
        let pool = open(&state).await;
        let own = own_disk(&pool, &state).await.id;
        let built = publish(&pool, &own, "first", &["mine"]).await;
        until_stored(&state, &built).await;
        pool.close(OnClose::Kill).await;

        // No other template needs the base any longer.
        let images = state.0.join("images");
        let bases = || {
            let mut all = names(&images);
            all.retain(|name| images.join(name).join("memory").exists());
            all
        };
        let without = || PoolConfig {
            installed_templates: None,
            ..config(&state.0, 0)
        };
        let (pool, ..) = Pool::open(without()).await.expect("a pool");
        until("other images are removed", async || {
            (bases().len() == 1).then_some(())
        })
        .await;
        runs_on(&create(&pool, "mine").await, "first").await;
        pool.close(OnClose::Kill).await;

        let base = images.join(&bases()[0]);
        let aside = state.0.join("aside");
        fs::rename(&base, &aside).expect("a rename");
        let (pool, ..) = Pool::open(without()).await.expect("a pool");
        assert!(pool.template("mine").await.is_none(), "it cannot be used");
        pool.close(OnClose::Kill).await;
        fs::rename(&aside, &base).expect("a rename");
        let (pool, ..) = Pool::open(without()).await.expect("a pool");
        runs_on(&create(&pool, "mine").await, "first").await;
        pool.remove_template(&built).await.expect("a removal");
        pool.remove_template(&own).await.expect("a removal");
        let all = pool.list().await.expect("a list");
        for sandbox in all {
            pool.kill(&sandbox.id).await.expect("a kill");
        }
        until("the base is removed", async || {
            bases().is_empty().then_some(())
        })
        .await;
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}
