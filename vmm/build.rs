//! Compiles the monitor (`monitor/`) and links it into a flat image that `cube-vmm` embeds. Fails if the disassembly
//! contains a vector or x87 register: those registers hold guest state while the monitor runs.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

fn main() {
    let monitor =
        PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("monitor");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    println!("cargo:rerun-if-changed={}", monitor.display());
    let archive = out.join("libmonitor.a");
    let elf = out.join("monitor.elf");
    compile(&monitor, &archive);
    run(Command::new("ld")
        .args([
            "-static",
            "-nostdlib",
            "--gc-sections",
            "--no-warn-rwx-segments",
            "-T",
        ])
        .arg(monitor.join("link.ld"))
        .arg("-o")
        .arg(&elf)
        .arg("--whole-archive")
        .arg(&archive));
    check_registers(&elf);
    run(Command::new("objcopy")
        .args(["-O", "binary"])
        .arg(&elf)
        .arg(out.join("monitor.bin")));
}

fn compile(monitor: &Path, archive: &Path) {
    let rustc = env::var("RUSTC").expect("cargo sets it");
    run(Command::new(rustc)
        .args([
            "--edition",
            "2024",
            "--crate-name",
            "monitor",
            "--crate-type",
            "staticlib",
        ])
        .arg(monitor.join("src/lib.rs"))
        .args(["--cfg", "monitor_image", "--cap-lints", "warn"])
        .args(["-C", "panic=abort", "-C", "opt-level=2", "-C", "lto=fat"])
        .args([
            "-C",
            "codegen-units=1",
            "-C",
            "no-vectorize-loops",
            "-C",
            "no-vectorize-slp",
        ])
        .args(["-C", "no-redzone=y", "-C", "relocation-model=pic"])
        .arg("-o")
        .arg(archive));
}

fn check_registers(elf: &Path) {
    let listing = Command::new("objdump")
        .args(["-d", "--no-show-raw-insn"])
        .arg(elf)
        .output()
        .expect("objdump (package binutils) must be installed");
    assert!(listing.status.success(), "objdump failed");
    let text = String::from_utf8_lossy(&listing.stdout);
    let bad: Vec<&str> = text
        .lines()
        .filter(|l| {
            ["%xmm", "%ymm", "%zmm", "%mm", "%st", "%k"]
                .iter()
                .any(|r| l.contains(r))
        })
        .collect();
    assert!(
        bad.is_empty(),
        "the monitor uses vector or x87 registers:\n{}",
        bad.join("\n")
    );
    assert!(text.contains("iretq"), "the disassembly shows no code");
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|e| {
        panic!(
            "cannot run {:?} (packages gcc, binutils): {e}",
            command.get_program()
        )
    });
    assert!(status.success(), "{command:?} failed");
}
