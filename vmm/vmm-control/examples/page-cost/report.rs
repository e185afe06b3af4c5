//! Numbers from /proc, and the table.

use std::{fs, io, ops::Range};

use crate::{Cost, MECHANISMS, PHASES, TURNS, Turn};

/// A number from /proc/meminfo.
pub(crate) fn memory_info(name: &str) -> io::Result<u64> {
    Ok(number(&fs::read_to_string("/proc/meminfo")?, name))
}

/// KiB of page tables of this process.
pub(crate) fn page_tables() -> io::Result<u64> {
    Ok(number(&fs::read_to_string("/proc/self/status")?, "VmPTE:"))
}

/// Sum of the numbers in the lines that begin with `name`.
fn number(text: &str, name: &str) -> u64 {
    let values = text.lines().filter_map(|line| line.strip_prefix(name));
    values
        .filter_map(|value| value.split_whitespace().next()?.parse::<u64>().ok())
        .sum()
}

/// KiB of a mapping without a file behind them: pages of this process alone.
pub(crate) fn anonymous(mapping: &Range<usize>) -> io::Result<u64> {
    let mut inside = false;
    let mut sum = 0;
    for line in fs::read_to_string("/proc/self/smaps")?.lines() {
        let start = line
            .split_once('-')
            .map(|(start, _)| usize::from_str_radix(start, 16));
        match start {
            Some(Ok(start)) => inside = mapping.contains(&start),
            _ if inside => sum += number(line, "Anonymous:"),
            _ => {}
        }
    }
    Ok(sum)
}

/// Prints the host properties on which the figures depend.
pub(crate) fn print_host(cpu: usize) -> io::Result<()> {
    let info = fs::read_to_string("/proc/cpuinfo")?;
    let value = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split(": ").nth(1)).unwrap_or("?")
    };
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    println!(
        "CPU {cpu} of {}, model {}, Linux {}, load {}",
        value("model name"),
        value("model\t"),
        release.trim(),
        fs::read_to_string("/proc/loadavg")?.trim(),
    );
    Ok(())
}

pub(crate) fn print_table(turns: &[Vec<Turn>]) {
    println!(
        "\nCPU time in ns, best / median of {TURNS}; best wall time in parentheses. Private, tables: KiB"
    );
    let phases = PHASES.join(" | ");
    println!("mechanism | {phases} | private after reads | after writes | tables");
    for ((name, ..), turns) in MECHANISMS.iter().zip(turns) {
        let Some(last) = turns.last() else { continue };
        let cells: Vec<String> = (0..PHASES.len()).map(|phase| cell(turns, phase)).collect();
        let (cells, [read, written]) = (cells.join(" | "), last.private);
        println!("{name} | {cells} | {read} | {written} | {}", last.tables);
    }
}

fn cell(turns: &[Turn], phase: usize) -> String {
    let costs: Vec<Cost> = turns.iter().filter_map(|turn| turn.costs[phase]).collect();
    let mut cpu: Vec<u128> = costs.iter().map(|cost| cost.cpu.as_nanos()).collect();
    let wall = costs.iter().map(|cost| cost.wall.as_nanos()).min();
    cpu.sort_unstable();
    match (cpu.first(), wall) {
        (Some(best), Some(wall)) => format!("{best} / {} ({wall})", cpu[cpu.len() / 2]),
        _ => "-".to_owned(),
    }
}
