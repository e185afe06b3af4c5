//! The cost of diff snapshots in time and bytes.

use std::{fs, path::Path, time::Instant};

use test_cases::found;
use vmm_control::SnapshotContent;

use crate::support::{TestVm, run_dir};

/// Prints the cost of pause and resume, with a full snapshot and with a diff: times in ms (median of [`ROUNDS`]) and
/// bytes stored. Does not check times; `results/notes-develop.md` contains a run.
pub(crate) fn soak_the_cost_of_diffs() {
    use vmm_control::template::LoadedTemplate;
    let loaded = LoadedTemplate::load(crate::support::template()).ok();
    let base = loaded.as_ref().map(LoadedTemplate::dir);
    eprintln!(
        "state of the clone        content    save   MB stored   restore  first exec  private MB"
    );
    for (state, script) in [
        ("at rest", "true"),
        ("4 MiB in memory", "head -c 4M /dev/urandom > /dev/shm/x"),
        ("64 MiB in memory", "head -c 64M /dev/urandom > /dev/shm/x"),
        (
            "64 MiB on disk",
            "head -c 64M /dev/urandom > /root/x; sync; echo 3 > /proc/sys/vm/drop_caches",
        ),
    ] {
        for content in [SnapshotContent::Full, SnapshotContent::Diff] {
            let stored = cost_of(state, script, content, base.as_deref());
            found!("{state}, {content:?}: {stored:.1} MB");
            let diff_at_rest = content == SnapshotContent::Diff && state == "at rest";
            assert!(!diff_at_rest || stored < 16.0, "{stored} MB");
        }
    }
}

const ROUNDS: usize = 7;

/// Prints one line of the table. Returns the megabytes stored.
fn cost_of(state: &str, script: &str, content: SnapshotContent, base: Option<&Path>) -> f64 {
    let ms = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
    let mut columns: [Vec<f64>; 5] = Default::default();
    for _ in 0..ROUNDS {
        let mut vm = TestVm::clone_of(base.unwrap_or(crate::support::template()));
        vm.sh(script);
        let dir = run_dir::make("cost").join("t");
        let start = Instant::now();
        let written = vm.control().write_snapshot(&dir, content);
        written.expect("a snapshot");
        columns[0].push(ms(start));
        drop(vm);
        columns[1].push(stored(&dir));
        let mut clone = TestVm::spawn();
        let mut spec = clone.restore_spec(&dir);
        spec.base = base.map(Path::to_owned);
        let start = Instant::now();
        clone.control().restore(spec, None).expect("a restore");
        columns[2].push(ms(start));
        clone.control().resume().expect("a resume");
        clone.identify();
        clone.exec("/usr/local/bin/probe", &[]);
        columns[3].push(ms(start));
        let private = clone.stats().guest_private_bytes.unwrap_or(0);
        columns[4].push(mb(private));
        drop(clone);
        fs::remove_dir_all(dir).expect("a removal");
    }
    let [save, bytes, restore, exec, private] = columns.map(|mut values| {
        values.sort_by(f64::total_cmp);
        values[ROUNDS / 2]
    });
    let content = format!("{content:?}");
    eprintln!(
        "{state:<24}  {content:<7} {save:>7.1} {bytes:>11.1} {restore:>9.1} {exec:>11.1} {private:>11.1}"
    );
    bytes
}

/// Disk space of a directory's files in megabytes.
fn stored(dir: &Path) -> f64 {
    use std::os::unix::fs::MetadataExt;
    let files = fs::read_dir(dir).expect("a directory").flatten();
    let blocks = files.map(|file| file.metadata().expect("a file").blocks());
    mb(blocks.sum::<u64>() * 512)
}

fn mb(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes / 1000).unwrap_or(u32::MAX)) / 1e3
}
