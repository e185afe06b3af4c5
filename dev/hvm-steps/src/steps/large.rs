//! Steps on VMs with four vCPUs and with memory above the hole below 4 GiB.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use model::Bytes;

use super::state::{Laps, SMP, State};
use crate::vm::{MEMORY, Vm};

/// All four vCPUs run and use the devices, and all of them continue after a restore.
pub(super) fn four_vcpus(state: &mut State<'_>) -> Result<String> {
    const WORK: &str = "nproc
        for cpu in 0 1 2 3; do
            taskset -c $cpu bash -ec \"dd if=/dev/urandom of=/var/tmp/$cpu bs=64k count=8 \
                conv=fsync status=none; echo 3 > /proc/sys/vm/drop_caches; \
                head -c 4M /dev/vda | cksum; cksum < /var/tmp/$cpu > /dev/null\" &
        done; wait";
    let template = state.template(SMP);
    let mut laps = Laps::start();
    let mut vm = Vm::boot(state.config, (MEMORY, 4), None)?;
    laps.lap("boot");
    let before = check_four(&vm.sh(WORK)?)?;
    laps.lap("I/O");
    // The snapshot is taken with a counting loop on each vCPU; the counters must rise in the clone. `1<>` writes
    // without truncating the file first, so that a reader always finds a number.
    vm.sh("for cpu in 0 1 2 3; do
        taskset -c $cpu bash -c 'n=0; while :; do n=$((n+1)); echo $n 1<> /run/count$0; done' $cpu \
            > /dev/null 2>&1 &
        echo $!; done > /run/load
        until test $(cat /run/count? 2> /dev/null | wc -l) = 4; do sleep 0.01; done")?;
    vm.process.control.snapshot(&template)?;
    laps.lap("snapshot");
    drop(vm);
    let clone = Vm::restore(state.config, &template)?;
    laps.lap("restore");
    all_go_on(&clone)?;
    clone.sh("kill $(cat /run/load)")?;
    laps.lap("counters");
    ensure!(
        check_four(&clone.sh(WORK)?)? == before,
        "the clone reads other bytes from /dev/vda than its source"
    );
    laps.lap("I/O");
    Ok(laps.summary())
}

/// Waits until all four counters have risen.
fn all_go_on(clone: &Vm) -> Result<()> {
    let counts = || numbers(&clone.sh("cat /run/count0 /run/count1 /run/count2 /run/count3")?);
    let first = counts()?;
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let now = counts()?;
        if now.iter().zip(&first).all(|(now, first)| now > first) {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "a vCPU does not run: the counters went from {first:?} to {now:?}"
        );
    }
}

/// RAM on both sides of the hole below 4 GiB is saved and restored. The guest's kernel allocates from the upper part
/// first. Most of the guest's memory is never touched, so the step also runs on hosts with less memory.
pub(super) fn above_the_hole(state: &mut State<'_>) -> Result<String> {
    const BYTES: Bytes = Bytes::mib(3072 + 256);
    const USE: &str = "sha256sum /dev/shm/high";
    let (whole, diff) = (state.template("high"), state.template("high-diff"));
    let mut laps = Laps::start();
    let mut vm = Vm::boot(state.config, (BYTES, 1), None)?;
    laps.lap("boot");
    let map = vm.sh("grep 'System RAM' /proc/iomem; awk '/MemTotal/ {print $2}' /proc/meminfo")?;
    let total: u64 = map.lines().last().unwrap_or_default().parse()?;
    ensure!(
        map.contains("100000000-10fffffff : System RAM") && total > 3_200_000,
        "wrong memory map or size: {map}"
    );
    let sum = vm.sh(&format!("head -c 12M /dev/urandom > /dev/shm/high; {USE}"))?;
    vm.process.control.snapshot(&whole)?;
    laps.lap("snapshot");
    drop(vm);
    let mut clone = Vm::restore(state.config, &whole)?;
    laps.lap("restore");
    ensure!(
        clone.sh(USE)? == sum,
        "the memory of the clone differs from its source's"
    );
    let more = clone.sh(&format!("head -c 1M /dev/urandom >> /dev/shm/high; {USE}"))?;
    clone.process.control.snapshot_diff(&diff)?;
    laps.lap("diff");
    drop(clone);
    let clone = Vm::restore(state.config, &diff)?;
    laps.lap("restore");
    ensure!(
        clone.sh(USE)? == more,
        "the memory of the clone of the diff differs from its source's"
    );
    fs::remove_dir_all(&whole)?;
    fs::remove_dir_all(&diff)?;
    Ok(laps.summary())
}

fn numbers(text: &str) -> Result<Vec<u64>> {
    let numbers = text.lines().map(|line| Ok(line.trim().parse()?));
    let numbers = numbers.collect::<Result<Vec<u64>>>()?;
    ensure!(numbers.len() == 4, "expected four numbers, got {text:?}");
    Ok(numbers)
}

/// Checks that the guest has four processors and that all four read the same checksum, which is returned.
fn check_four(output: &str) -> Result<String> {
    let lines: Vec<_> = output.lines().collect();
    match lines[..] {
        ["4", a, b, c, d] if [b, c, d] == [a; 3] => Ok(a.to_owned()),
        _ => bail!("expected 4 processors and four equal checksums, got {output:?}"),
    }
}
