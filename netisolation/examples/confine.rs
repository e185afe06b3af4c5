//! Measures the calls that the start of a sandbox and a change of its policy wait for, with many TAPs open at once. Run
//! as root:
//! `unshare --net cargo run --release -p netisolation --example confine [TAPS] [RULES]`.

use std::{
    env,
    error::Error,
    net::Ipv4Addr,
    path::PathBuf,
    time::{Duration, Instant},
};

use ipnet::{IpNet, Ipv4Net};
use model::SandboxId;
use netisolation::{
    ForbiddenAddresses, Isolation, IsolationConfig, Policy, Rule, RuleAction, Tap, Uplinks,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1).map(|text| text.parse::<u32>());
    let taps = arguments.next().transpose()?.unwrap_or(500);
    let rules = arguments.next().transpose()?.unwrap_or(8);
    let config = IsolationConfig {
        instance: "example".to_owned(),
        pins: PathBuf::from("/sys/fs/bpf/cube-example"),
        uplinks: Uplinks::DefaultRoutes,
        forbidden: ForbiddenAddresses::default(),
        stock: 0,
        // Numbers of released TAPs are reused as late as possible.
        max_taps: 2 * taps,
        max_flows: 1024,
        bytes_per_s: None,
        proxy: false,
    };
    let (isolation, _events) = Isolation::open(&config)?;
    let all = measure("take (new TAP)", taps, |_| isolation.take())?;
    let sandbox = SandboxId::from_random([7; 19]);
    let common = policy(rules, 0)?;
    let own = |n: u32| policy(rules, n + 1);
    let of = |n: u32| {
        all.get(usize::try_from(n).unwrap_or(0))
            .map(|tap: &Tap| tap.index)
    };
    let tap = |n| of(n).ok_or_else(|| Box::<dyn Error>::from("no such TAP"));
    let confine = |n, policy: &Policy| {
        let confined = isolation.confine(tap(n)?, &sandbox, policy);
        confined.map_err(Box::<dyn Error>::from)
    };
    let update = |n, policy: &Policy| {
        let updated = isolation.update(tap(n)?, policy);
        updated.map_err(Box::<dyn Error>::from)
    };
    measure("confine, shared rules", taps, |n| confine(n, &common))?;
    let policies = (0..taps).map(own).collect::<Result<Vec<_>, _>>()?;
    let own = |n: u32| {
        policies
            .get(usize::try_from(n).unwrap_or(0))
            .unwrap_or(&common)
    };
    measure("update, own rules", taps, |n| update(n, own(n)))?;
    measure("update, shared rules", taps, |n| update(n, &common))?;
    measure("confine, own rules", taps, |n| confine(n, own(n)))?;
    measure("verify", taps, |n| {
        isolation.verify(tap(n)?).map_err(Box::<dyn Error>::from)
    })?;
    measure("counters", taps, |n| {
        isolation.counters(tap(n)?).map_err(Box::<dyn Error>::from)
    })?;
    measure("release", taps, |n| {
        tap(n).map(|tap| isolation.release(tap))
    })?;
    drop(all);
    measure("take (reset TAP)", taps, |_| isolation.take())?;
    Ok(())
}

/// A policy with `rules` rules: one for a block that depends on `number`, the others for adjacent blocks.
fn policy(rules: u32, number: u32) -> Result<Policy, Box<dyn Error>> {
    let block = |n: u32| {
        let address = Ipv4Addr::from_bits(Ipv4Addr::new(20, 0, 0, 0).to_bits() + (n << 8));
        let bits = if n == 0 { 32 } else { 24 };
        let address = if n == 0 {
            Ipv4Addr::from_bits((30 << 24) + number)
        } else {
            address
        };
        Ok(Rule {
            block: IpNet::V4(Ipv4Net::new(address, bits)?),
            action: RuleAction::Allow(Vec::new()),
        })
    };
    Ok(Policy {
        rules: (0..rules)
            .map(block)
            .collect::<Result<_, Box<dyn Error>>>()?,
        ..Policy::default()
    })
}

/// Calls `work` `times` times and prints nearest-rank quantiles of the duration.
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
