//! How long the first cells of a clone take, and what memory an idle one keeps, for people to read: nothing here
//! depends on the numbers.

use std::{collections::BTreeMap, time::Instant};

use crate::{clone::Clone, main_text};

#[test]
fn interpreter_latency_of_first_cells() {
    let (mut firsts, mut seconds) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        let started = Instant::now();
        let clone = Clone::start();
        assert_eq!(main_text(&clone.python("1+1")), "2");
        firsts.push(started.elapsed());
        let started = Instant::now();
        assert_eq!(main_text(&clone.python("1+1")), "2");
        seconds.push(started.elapsed());
    }
    firsts.sort();
    seconds.sort();
    println!(
        "create to result of 1+1, n = 10: median {:?}, all {firsts:?}",
        firsts[5]
    );
    println!(
        "second cell, n = 10: median {:?}, all {seconds:?}",
        seconds[5]
    );
}

/// Fields of /proc/PID/smaps_rollup in KiB.
fn memory(pid: u32) -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let field = |line: &str| {
        let (name, value) = line.split_once(':')?;
        Some((
            name.to_owned(),
            value.trim().strip_suffix(" kB")?.parse().ok()?,
        ))
    };
    text.lines().filter_map(field).collect()
}

#[test]
fn interpreter_memory_of_idle_clones() {
    let clones: Vec<Clone> = (0..10).map(|_| Clone::start()).collect();
    for clone in &clones {
        assert_eq!(main_text(&clone.python("1+1")), "2");
    }
    // Pages of the template's file are the host's once, whatever their state.
    let own = |clone: &Clone| memory(clone.pid())["Anonymous"];
    let kib: Vec<u64> = clones.iter().map(own).collect();
    println!("anonymous memory of 10 idle clones after one cell, KiB: {kib:?}");
}
