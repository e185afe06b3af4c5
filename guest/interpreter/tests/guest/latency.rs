//! Prints the duration of a clone's first cells and the memory of an idle clone. No assertion depends on the numbers.

use std::{collections::BTreeMap, time::Instant};

use serde_json::{Value, json};

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
    // Pages of the template's file exist once on the host, regardless of their state.
    let own = |clone: &Clone| memory(clone.pid())["Anonymous"];
    let kib: Vec<u64> = clones.iter().map(own).collect();
    println!("anonymous memory of 10 idle clones after one cell, KiB: {kib:?}");
}

/// Nanoseconds on a CPU (`/proc/PID/schedstat`), and KiB of private memory (`/proc/PID/smaps_rollup`).
fn spent(pid: u32) -> (u64, u64) {
    let text = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap();
    let on_cpu = text.split(' ').next().unwrap().parse().unwrap();
    (on_cpu, memory(pid)["Anonymous"])
}

/// Runs `work` and prints the CPU time and memory that it took.
fn measured<T>(what: &str, clone: &Clone, work: impl FnOnce() -> T) -> T {
    let (cpu, own) = spent(clone.pid());
    let started = Instant::now();
    let done = work();
    let took = started.elapsed();
    let (cpu_after, own_after) = spent(clone.pid());
    println!(
        "{what}: {took:.1?}, {} us of CPU, {} pages",
        (cpu_after - cpu) / 1000,
        (own_after - own) / 4
    );
    done
}

#[test]
fn interpreter_latency_of_new_contexts() {
    for language in ["python", "javascript", "bash"] {
        for _ in 0..3 {
            let clone = Clone::start();
            if language != "bash" {
                measured("the default context's first cell", &clone, || {
                    clone.cell(language, "1+1")
                });
            }
            let body = json!({ "language": language });
            let (_, made) = measured(&format!("{language}: POST /contexts"), &clone, || {
                clone.ask("POST", "/contexts", &body)
            });
            let made: Value = serde_json::from_str(&made).unwrap();
            let id = made["id"].as_str().unwrap();
            let cell = json!({ "code": "1+1", "context_id": id });
            measured("its first cell", &clone, || clone.run(&cell));
            let path = format!("/contexts/{id}/restart");
            measured("a restart", &clone, || {
                clone.ask("POST", &path, &Value::Null)
            });
            measured("the first cell after it", &clone, || clone.run(&cell));
            measured("its second cell", &clone, || clone.run(&cell));
        }
    }
}

#[test]
fn interpreter_latency_of_cells_by_what_they_use() {
    for _ in 0..3 {
        for (what, code) in [
            ("1+1", "1+1"),
            ("json", "import json; json.loads('[1, {}]')"),
            ("numpy", "import numpy as np; np.arange(3).sum()"),
            ("pandas", "import pandas as pd; pd.DataFrame({'a':[1]})"),
            (
                "matplotlib",
                "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()",
            ),
            ("sympy, not warm", "import sympy; sympy.sqrt(8)"),
        ] {
            let clone = Clone::start();
            measured(what, &clone, || clone.python(code));
            measured("    again", &clone, || clone.python(code));
            measured("    1+1", &clone, || clone.python("1+1"));
        }
    }
}
