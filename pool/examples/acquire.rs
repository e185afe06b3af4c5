//! Measures leases: creates sandboxes from a warm stock, one after another and in bursts, runs a first command in each,
//! and prints quantiles of both in milliseconds. Needs root, `cube-vmm` and templates:
//!
//! ```text
//! CUBE_BIN=… CUBE_ARTIFACTS=… cargo run --release -p pool --example acquire -- [singles] [burst] [rounds] [none|isolated]
//! ```
//! The last argument selects whether sandboxes have a network. They do not use it, so the difference is the cost of TAP
//! and policy.

mod setup;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use envd::{ENVD_PORT, EnvdClient, ExecRequest};
use netisolation::{ForbiddenAddresses, Isolation, IsolationConfig, Uplinks};
use pool::{CreateSpec, Init, Lifetime, OnClose, Pool, PoolConfig, Sandbox};
use setup::{Failure, PATIENCE, config, number, quantile};

/// Milliseconds from the create to its response, and to the output of a first command.
struct Sample {
    created: f64,
    executed: f64,
    warm: bool,
    phases: String,
}

fn main() -> Result<(), Failure> {
    let (singles, burst, rounds) = (number(1, 50)?, number(2, 50)?, number(3, 3)?);
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(run(singles, burst, rounds))
}

async fn run(singles: u32, burst: u32, rounds: u32) -> Result<(), Failure> {
    let state = PathBuf::from(format!("/var/tmp/cube-acquire-{}", std::process::id()));
    let result = measure(&state, singles, burst, rounds).await;
    std::fs::remove_dir_all(&state)?;
    result
}

async fn measure(
    state: &std::path::Path,
    singles: u32,
    burst: u32,
    rounds: u32,
) -> Result<(), Failure> {
    let warm = burst.max(4);
    let (pool, _, _ended) = Pool::open(PoolConfig {
        network: network()?,
        ..config(state, warm)?
    })
    .await?;
    let before = meminfo()?;
    let start = Instant::now();
    until_warm(&pool, warm).await;
    let (took, after) = (start.elapsed(), meminfo()?);
    println!(
        "filled {warm} slots in {took:?}: {:.1} a second, {} KiB of MemAvailable each",
        f64::from(warm) / took.as_secs_f64(),
        before.saturating_sub(after) / 1024 / u64::from(warm)
    );
    let mut alone = Vec::new();
    for _ in 0..singles {
        let (sample, sandbox) = lease(&pool).await?;
        alone.push(sample);
        pool.kill(&sandbox.id).await?;
        until_warm(&pool, warm).await;
    }
    print("single", &mut alone);
    let mut together = Vec::new();
    for _ in 0..rounds {
        let tasks: Vec<_> = (0..burst)
            .map(|_| {
                let pool = pool.clone();
                tokio::spawn(async move { lease(&pool).await })
            })
            .collect();
        let mut sandboxes = Vec::new();
        for task in tasks {
            let (sample, sandbox) = task.await??;
            together.push(sample);
            sandboxes.push(sandbox);
        }
        for sandbox in sandboxes {
            pool.kill(&sandbox.id).await?;
        }
        until_warm(&pool, warm).await;
    }
    print(&format!("burst of {burst}"), &mut together);
    pool.close(OnClose::Kill).await;
    Ok(())
}

async fn lease(pool: &Pool) -> Result<(Sample, Sandbox), Failure> {
    let start = Instant::now();
    let spec = CreateSpec {
        template: "base".into(),
        init: Init::default(),
        note: "{}".into(),
        lifetime: Lifetime {
            end_at: u64::MAX,
            ..Lifetime::default()
        },
        policy: netisolation::Policy::default(),
        priority: pool::Priority::default(),
    };
    let sandbox = pool.create(spec).await?;
    let created = start.elapsed();
    let vsock = sandbox.vsock.clone();
    let run = tokio::task::spawn_blocking(move || -> Result<(), Failure> {
        let mut agent = EnvdClient::connect(&vsock, ENVD_PORT, PATIENCE)?;
        let mut request = ExecRequest::new("/bin/echo", &["on"]);
        request.user = Some("root".into());
        let out = agent.exec(&request, PATIENCE)?;
        if out.stdout == b"on\n" {
            Ok(())
        } else {
            Err("another answer".into())
        }
    });
    run.await??;
    let ms = |d: Duration| d.as_secs_f64() * 1000.0;
    let first = sandbox.timeline.iter().next().map_or(0, |(_, at)| at);
    let phases = sandbox
        .timeline
        .iter()
        .map(|(phase, at)| format!("{} {} µs", phase.name(), (at - first) / 1000));
    let sample = Sample {
        created: ms(created),
        executed: ms(start.elapsed()),
        warm: sandbox.warm,
        phases: phases.collect::<Vec<_>>().join(", "),
    };
    Ok((sample, sandbox))
}

fn print(what: &str, samples: &mut [Sample]) {
    let n = samples.len();
    let warm = samples.iter().filter(|s| s.warm).count();
    let mut created: Vec<_> = samples.iter().map(|s| s.created).collect();
    let mut executed: Vec<_> = samples.iter().map(|s| s.executed).collect();
    println!(
        "{what} (n = {n}, {warm} warm): created P50 {:.2} P95 {:.2} ms, first command P50 {:.2} P95 {:.2} ms",
        quantile(&mut created, 50),
        quantile(&mut created, 95),
        quantile(&mut executed, 50),
        quantile(&mut executed, 95),
    );
    samples.sort_by(|a, b| a.created.total_cmp(&b.created));
    if let Some(middle) = samples.get(n / 2) {
        println!("  the middle one: {}", middle.phases);
    }
}

async fn until_warm(pool: &Pool, warm: u32) {
    loop {
        let stats = pool.stats().await;
        if stats.warm >= warm && stats.filling == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The network that the last argument selects.
fn network() -> Result<Option<Isolation>, Failure> {
    match std::env::args().nth(4).as_deref() {
        None | Some("none") => return Ok(None),
        Some("isolated") => {}
        Some(other) => return Err(format!("{other:?} is neither none nor isolated").into()),
    }
    let (isolation, _events) = Isolation::open(&IsolationConfig {
        instance: format!("acquire{}", std::process::id()),
        pins: "/sys/fs/bpf/cube".into(),
        uplinks: Uplinks::DefaultRoutes,
        forbidden: ForbiddenAddresses::default(),
        stock: 4,
        max_taps: 1024,
        max_flows: 1024,
        bytes_per_s: None,
        proxy: false,
    })?;
    Ok(Some(isolation))
}

fn meminfo() -> Result<u64, Failure> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib: u64 = line
        .ok_or("no MemAvailable")?
        .trim()
        .trim_end_matches(" kB")
        .parse()?;
    Ok(kib << 10)
}
