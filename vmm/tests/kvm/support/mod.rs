//! Support for the tests: the host's capabilities, a directory per run, VMs, guest programs.

pub(crate) mod host;
pub(crate) mod program;
pub(crate) mod run_dir;
pub(crate) mod sys;
pub(crate) mod template;
pub(crate) mod vm;
pub(crate) mod wait;

pub(crate) use template::template;
pub(crate) use vm::TestVm;
pub(crate) use wait::until;

/// Length of a file, and hash of its content without holes and zero blocks.
pub(crate) fn sparse_sum(path: &std::path::Path) -> model::FileSum {
    let file = std::fs::File::open(path).expect("a file");
    vmm::snapshot::sparse_sum(&file, path).expect("a sum")
}
