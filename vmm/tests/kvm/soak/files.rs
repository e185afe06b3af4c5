//! Random operations on files of the writable layer while the VM moves from snapshot to snapshot.

use std::{fs, time::Duration};

use model::Bytes;
use test_cases::found;

use super::suite::prepared;
use crate::support::{TestVm, run_dir, until};

/// Operations of each exerciser.
const OPERATIONS: u32 = 60_000;
const EXERCISERS: usize = 4;
const GENERATIONS: usize = 12;
const PATIENCE: Duration = Duration::from_secs(1800);

/// All kinds of operations. Every second exerciser works on whole pages, and does not use posix_fallocate: fsx 0.3.2
/// may call it with a length of zero, which Linux rejects.
fn config(exerciser: usize) -> String {
    let (align, fallocate) = [(1, 1), (4096, 0)][exerciser % 2];
    format!(
        "flen = 4194304\n[opsize]\nmin = 1\nmax = 131072\nalign = {align}\n[weights]\nposix_fallocate = {fallocate}\n\
         close_open = 1\nread = 10\nwrite = 10\nmapread = 10\nmapwrite = 10\ninvalidate = 1\ntruncate = 3\nfsync = 0.3\n\
         fdatasync = 0.3\npunch_hole = 3\nsendfile = 3\nposix_fadvise = 3\ncopy_file_range = 3\n"
    )
}

/// Several `fsx` compare each byte that they read with what they wrote. At the same time, the page cache
/// is dropped, and the VM is repeatedly replaced by a clone of its own snapshot.
pub(crate) fn soak_files_across_generations() {
    let parent = run_dir::make("files");
    let mut vm = TestVm::boot(|spec| spec.memory = Bytes::mib(512));
    let fsx = fs::read(prepared("fsx/bin/fsx")).expect("fsx");
    vm.agent()
        .write_file("/root/fsx", &fsx, Some("root"))
        .expect("an upload");
    vm.sh("chmod 755 /root/fsx");
    for exerciser in 0..EXERCISERS {
        vm.agent()
            .write_file(
                &format!("/root/{exerciser}.toml"),
                config(exerciser).as_bytes(),
                Some("root"),
            )
            .expect("an upload");
        vm.sh(&format!(
            "cd /root; setsid sh -c './fsx -f {exerciser}.toml -S {exerciser} -N {OPERATIONS} file-{exerciser} >{exerciser}.log 2>&1; \
             echo $? >{exerciser}.part; mv {exerciser}.part {exerciser}.status' </dev/null >/dev/null 2>&1 &"
        ));
    }
    vm.sh("setsid sh -c 'while sleep 1; do echo 1 >/proc/sys/vm/drop_caches; done' </dev/null >/dev/null 2>&1 &");
    let mut moved = 0;
    for generation in 0..GENERATIONS {
        if ended(&vm) == EXERCISERS {
            break;
        }
        let dir = parent.join(generation.to_string());
        vm.control().snapshot(&dir).expect("a snapshot");
        vm = TestVm::clone_of(&dir);
        fs::remove_dir_all(dir).expect("a removal");
        moved += 1;
        vm.sh("sleep 3");
    }
    until("all exercisers end", PATIENCE, || {
        vm.sh("sleep 1");
        (ended(&vm) == EXERCISERS).then_some(())
    });
    for exerciser in 0..EXERCISERS {
        let status = vm.sh(&format!("cat /root/{exerciser}.status"));
        let log = vm.sh(&format!("tail -n 60 /root/{exerciser}.log"));
        assert_eq!(status, "0", "fsx {exerciser}: {log}");
        assert!(log.contains("All operations completed"), "{log}");
    }
    assert!(moved > 2, "the exercisers ended after {moved} generations");
    found!(
        "{EXERCISERS} exercisers, {OPERATIONS} operations each, across {moved} generations: every byte as written"
    );
    vm.assert_healthy();
}

/// Number of exercisers that have ended.
fn ended(vm: &TestVm) -> usize {
    vm.sh("cd /root; ls *.status 2>/dev/null | wc -l")
        .parse()
        .expect("a number")
}
