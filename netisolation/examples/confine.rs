//! How long the calls take that a sandbox's start and changes of its policy wait for, with many TAPs at once:
//! `unshare --net cargo run --release -p netisolation --example confine [TAPS] [RULES]`, as root.

use std::{
    env,
    error::Error,
    net::Ipv4Addr,
    path::PathBuf,
    time::{Duration, Instant},
};

use ipnet::{IpNet, Ipv4Net};
use model::SandboxId;
use netisolation::{Isolation, IsolationConfig, Policy, Rule, Tap, Uplinks, Verdict};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1).map(|text| text.parse::<u32>());
    let taps = arguments.next().transpose()?.unwrap_or(500);
    let rules = arguments.next().transpose()?.unwrap_or(8);
    let config = IsolationConfig {
        instance: "example".to_owned(),
        pins: PathBuf::from("/sys/fs/bpf/cube-example"),
        uplinks: Uplinks::DefaultRoutes,
        exceptions: Vec::new(),
        dns_servers: Vec::new(),
        stock: 0,
        max_taps: taps,
        max_flows: 1024,
    };
    let (isolation, _events) = Isolation::open(&config)?;
    let all = measure("take (made now)", taps, |_| isolation.take())?;
    let sandbox = SandboxId::from_random([7; 19]);
    let policy = policy(rules)?;
    let of = |n: u32| {
        all.get(usize::try_from(n).unwrap_or(0))
            .map(|tap: &Tap| tap.index)
    };
    let tap = |n| of(n).ok_or_else(|| Box::<dyn Error>::from("no such TAP"));
    measure("confine, which verifies", taps, |n| {
        isolation
            .confine(tap(n)?, &sandbox, &policy)
            .map_err(Box::<dyn Error>::from)
    })?;
    measure("update", taps, |n| {
        isolation
            .update(tap(n)?, &policy)
            .map_err(Box::<dyn Error>::from)
    })?;
    measure("verify", taps, |n| {
        isolation.verify(tap(n)?).map_err(Box::<dyn Error>::from)
    })?;
    measure("counters", taps, |n| {
        isolation.counters(tap(n)?).map_err(Box::<dyn Error>::from)
    })?;
    measure("release", taps, |n| {
        tap(n).map(|tap| isolation.release(tap))
    })?;
    Ok(())
}

/// So many neighbouring blocks.
fn policy(rules: u32) -> Result<Policy, Box<dyn Error>> {
    let block = |n: u32| {
        let address = Ipv4Addr::from_bits(Ipv4Addr::new(20, 0, 0, 0).to_bits() + (n << 8));
        Ok(Rule {
            block: IpNet::V4(Ipv4Net::new(address, 24)?),
            verdict: Verdict::Allow(Vec::new()),
        })
    };
    Ok(Policy {
        rules: (0..rules)
            .map(block)
            .collect::<Result<_, Box<dyn Error>>>()?,
        ..Policy::default()
    })
}

/// Does it `times` times and prints nearest-rank quantiles.
fn measure<T, E>(what: &str, times: u32, work: impl Fn(u32) -> Result<T, E>) -> Result<Vec<T>, E> {
    let mut taken = Vec::new();
    let mut results = Vec::new();
    for n in 0..times {
        let began = Instant::now();
        results.push(work(n)?);
        taken.push(began.elapsed());
    }
    taken.sort_unstable();
    let quantile = |percent: usize| -> Duration {
        let rank = (taken.len() * percent).div_ceil(100).max(1);
        taken.get(rank - 1).copied().unwrap_or_default()
    };
    println!(
        "{what}: P50 {:?}, P95 {:?}, maximum {:?} (n = {times})",
        quantile(50),
        quantile(95),
        quantile(100)
    );
    Ok(results)
}
