//! Measures a pool with many templates: lists all of them, and creates a first sandbox from some disk and built
//! templates. Prints quantiles in milliseconds. Needs root, `cube-vmm` and templates:
//!
//! ```text
//! CUBE_BIN=… CUBE_ARTIFACTS=… cargo run --release -p pool --example many_templates -- [disks] [built]
//! ```
//! Each disk template has its own directory and its own link to a root image, but all links refer to one copy. Before
//! each create, the files of the template and the root image are removed from the page cache. Each template is then
//! used again with its files in the page cache.

mod setup;

use std::{
    fs::File,
    path::{Path, PathBuf},
    time::Instant,
};

use model::Bytes;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use pool::{CreateSpec, DiskSpec, Init, Lifetime, OnClose, Pool, Priority, TemplateDefaults};
use setup::{Failure, config, number, quantile, variable};

/// Number of disk templates from which a sandbox is created, and of list calls.
const BOOTS: usize = 20;
const LISTS: usize = 300;
/// Makes every create a cold one.
const NO_WARM: u32 = 0;

fn main() -> Result<(), Failure> {
    let (disks, built) = (number(1, 300)?, number(2, 40)?);
    let state = PathBuf::from(format!("/var/tmp/cube-many-{}", std::process::id()));
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(measure(&state, disks, built));
    std::fs::remove_dir_all(&state)?;
    result
}

async fn measure(state: &Path, disks: u32, built: u32) -> Result<(), Failure> {
    let (pool, ..) = Pool::open(config(state, NO_WARM)?).await?;
    // A copy, so that no other program uses its page cache.
    let root = state.join("root.erofs");
    std::fs::copy(variable("CUBE_ARTIFACTS")?.join("guest/base.erofs"), &root)?;
    let (mut booted, mut published) = (Vec::new(), Vec::new());
    for _ in 0..disks {
        let disk = DiskSpec {
            root: root.clone(),
            layer: None,
            memory: Bytes::mib(256),
            vcpus: 1,
        };
        booted.push(pool.add_disk(disk).await?.id);
    }
    let first = booted.first().ok_or("no disks")?;
    let build = pool.create(spec(first)).await?;
    for n in 0..built {
        let names = vec![format!("built-{n}")];
        let template = pool.publish(&build.id, names, TemplateDefaults::default());
        published.push(template.await?.id);
    }
    pool.kill(&build.id).await?;
    pool.close(OnClose::Keep).await;

    let started = Instant::now();
    let (pool, ..) = Pool::open(config(state, NO_WARM)?).await?;
    println!(
        "opened with {} templates in {:.0} ms",
        pool.templates().await.len(),
        ms(started)
    );
    let mut lists = Vec::new();
    for _ in 0..LISTS {
        let started = Instant::now();
        pool.templates().await;
        lists.push(ms(started));
    }
    print("list", &mut lists);
    for (what, templates) in [
        ("built", &published[..]),
        ("disk", &booted[..BOOTS.min(booted.len())]),
    ] {
        let (mut cold, mut cached) = (Vec::new(), Vec::new());
        for template in templates {
            evict(&root)?;
            for file in std::fs::read_dir(state.join("templates").join(template).join("image"))? {
                evict(&file?.path())?;
            }
            for times in [&mut cold, &mut cached] {
                let started = Instant::now();
                let sandbox = pool.create(spec(template)).await?;
                times.push(ms(started));
                pool.kill(&sandbox.id).await?;
            }
        }
        print(
            &format!("create of a {what} template, cold page cache"),
            &mut cold,
        );
        print(
            &format!("create of a {what} template, files cached"),
            &mut cached,
        );
    }
    pool.close(OnClose::Kill).await;
    Ok(())
}

/// Removes a file from the page cache. Its pages must be clean.
fn evict(path: &Path) -> Result<(), Failure> {
    let file = File::open(path)?;
    file.sync_all()?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    Ok(())
}

fn ms(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e3
}

fn print(what: &str, values: &mut [f64]) {
    println!(
        "{what} (n = {}): P50 {:.2} P95 {:.2} ms",
        values.len(),
        quantile(values, 50),
        quantile(values, 95)
    );
}

fn spec(template: &str) -> CreateSpec {
    CreateSpec {
        template: template.to_owned(),
        init: Init::default(),
        note: "{}".into(),
        lifetime: Lifetime {
            timeout_s: 3600,
            ..Lifetime::default()
        },
        policy: netisolation::Policy::default(),
        priority: Priority::Normal,
    }
}
