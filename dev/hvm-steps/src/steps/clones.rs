//! Steps on snapshots and their clones.

use std::{
    fs,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, bail, ensure};
use model::template_file;

use super::state::{ONE, State, manifest};
use crate::vm::{MEMORY, Vm};

pub(super) fn snapshot(state: &mut State<'_>) -> Result<String> {
    let template = state.template(ONE);
    let vm = state.vm()?;
    vm.sh("echo kept > /root/mark; sync")?;
    vm.process.control.snapshot(&template)?;
    let memory = fs::metadata(template.join(template_file::MEMORY))?;
    let state = fs::metadata(template.join(template_file::STATE))?.len();
    let stored = std::os::unix::fs::MetadataExt::blocks(&memory) / 2048;
    // The VM keeps running after the snapshot.
    vm.process.control.resume()?;
    ensure!(
        vm.sh("cat /root/mark")? == "kept",
        "/root/mark is lost in the VM"
    );
    Ok(format!("memory {stored} MiB, state {state} bytes"))
}

/// The guest reads its whole root image; its checksum must be the one in the template's manifest.
pub(super) fn whole_image(state: &mut State<'_>) -> Result<String> {
    let manifest = manifest(&state.template(ONE))?;
    let sum = state.vm()?.sh("sha256sum < /dev/vda")?;
    let sum = sum.split_whitespace().next().unwrap_or_default();
    ensure!(
        sum == manifest.root_sum.sha256,
        "the guest reads a root image with SHA-256 {sum}, the manifest has {}",
        manifest.root_sum.sha256
    );
    state.vm = None;
    Ok(format!("{} bytes", manifest.root_sum.bytes))
}

pub(super) fn restore_twice(state: &mut State<'_>) -> Result<String> {
    let template = state.template(ONE);
    let mut times = Vec::new();
    for _ in 0..2 {
        let start = Instant::now();
        let vm = Vm::restore(state.config, &template)?;
        times.push(format!("{:.0} ms", start.elapsed().as_secs_f64() * 1e3));
        ensure!(
            vm.sh("cat /root/mark")? == "kept",
            "/root/mark is lost in the clone"
        );
        state.clones.push(vm);
    }
    Ok(format!("agent ready after {}", times.join(" and ")))
}

/// Two clones of one template differ in host name, machine id, boot id and random bytes, and have the right clock.
pub(super) fn identities(state: &mut State<'_>) -> Result<String> {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH);
    let mut seen = Vec::new();
    for vm in &state.clones {
        let before = now()?.as_secs();
        let output = vm.sh(
            "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id
            head -c 16 /dev/urandom | od -An -tx1; date +%s; awk '{print int($1)}' /proc/uptime",
        )?;
        let after = now()?.as_secs();
        let lines: Vec<String> = output.lines().map(str::to_owned).collect();
        ensure!(
            lines.len() == 6 && lines[0] == vm.hostname,
            "wrong host name or missing lines: {output:?}"
        );
        let clock: u64 = lines[4].parse()?;
        ensure!(
            (before - 3..=after + 3).contains(&clock),
            "the guest's clock is {clock}, the host's was {before} before the command and {after} after it"
        );
        seen.push(lines);
    }
    let [a, b] = &seen[..] else {
        bail!("expected two clones, found {}", seen.len());
    };
    for (i, what) in ["host name", "machine id", "boot id", "random bytes"]
        .iter()
        .enumerate()
    {
        ensure!(a[i] != b[i], "both clones have the {what} {}", a[i]);
    }
    Ok("host name, machine id, boot id, random bytes; clock right".to_owned())
}

/// A clone writes to pages of which it had none.
pub(super) fn touch(state: &mut State<'_>) -> Result<String> {
    let vm = state.clones.last().context("no clone is running")?;
    vm.sh("head -c 16M /dev/zero > /dev/shm/touch; rm /dev/shm/touch")
}

pub(super) fn second_generation(state: &mut State<'_>) -> Result<String> {
    let template = state.template("two");
    let mut parent = state.clones.pop().context("no clone is running")?;
    parent.sh("echo second > /root/second")?;
    parent.process.control.snapshot(&template)?;
    drop(parent);
    let child = Vm::restore(state.config, &template)?;
    let both = child.sh("cat /root/mark /root/second")?;
    ensure!(
        both == "kept\nsecond",
        "the clone of a clone has the files {both:?}"
    );
    fs::remove_dir_all(&template)?;
    Ok(String::new())
}

/// A diff snapshot of a clone stores less than a quarter of the guest's memory, and a clone of it has the parent's
/// files and memory.
pub(super) fn diff(state: &mut State<'_>) -> Result<String> {
    let (base, dir) = (state.template(ONE), state.template("diff"));
    let mut parent = Vm::restore(state.config, &base)?;
    parent.sh("echo third > /root/third; head -c 1M /dev/urandom > /dev/shm/third; sync")?;
    let sum = parent.sh("sha256sum /dev/shm/third")?;
    parent.process.control.snapshot_diff(&dir)?;
    drop(parent);
    let manifest = manifest(&dir)?;
    let named = manifest.base.context("the manifest names no base")?.dir;
    ensure!(
        named == base,
        "the manifest names the base {}, not {}",
        named.display(),
        base.display()
    );
    let bytes = manifest.memory_sum.bytes;
    ensure!(
        bytes < MEMORY.0 / 4,
        "the diff has {bytes} bytes of memory, a quarter of the guest's or more"
    );
    let child = Vm::restore(state.config, &dir)?;
    let output = child.sh("cat /root/mark /root/third; sha256sum /dev/shm/third")?;
    ensure!(
        output == format!("kept\nthird\n{sum}"),
        "the clone of the diff has other files: {output:?}"
    );
    fs::remove_dir_all(&dir)?;
    Ok(format!("{} KiB of memory", bytes >> 10))
}
