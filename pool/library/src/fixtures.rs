//! Templates, and a library of them, for tests of this crate and of the pool.
#![allow(clippy::unwrap_used, reason = "only tests use this module")]

use std::{
    fs::{self, File},
    path::Path,
    sync::Arc,
};

use model::{Bytes, MANIFEST_NAME, SandboxId, TEMPLATE_FORMAT, template_file::MEMORY};
use sha2::{Digest, Sha256};

use crate::{
    Library,
    account::{Account, Allowance},
    diff::{BLOCK, DiffPlan, Restorer, remove_aside, restore::write_blocks, set_memory_aside},
    images::Images,
    info::{TemplateDefaults, TemplateInfo, TemplateKind},
    memory_diff::{self, CHUNK, is_zero},
    record::TemplateRecord,
    store::Store,
    template::{Origin, Saved},
    vmms::{VmmId, Vmms},
};

/// A template named `base`.
pub fn info() -> TemplateInfo {
    TemplateInfo {
        id: "t".into(),
        names: vec!["base".into()],
        memory: Bytes::mib(256),
        vcpus: 1,
        disk: Bytes::mib(4096),
        created_unix_s: 1,
        kind: TemplateKind::Installed,
        source: None,
        spawned: 0,
        warm: 0,
        vmm: None,
        bytes: Bytes(0),
    }
}

/// A directory that looks like a template.
pub fn image(at: &Path, base: Option<&Path>) {
    fs::create_dir_all(at).unwrap();
    fs::write(at.join("root"), "").unwrap();
    let sum = |bytes| serde_json::json!({"bytes": bytes, "sha256": "0".repeat(64)});
    let mut json = serde_json::json!({
        "format": TEMPLATE_FORMAT, "platform": "ring3", "memory": "256MiB", "vcpus": 1,
        "hypercalls": null, "taken_at_unix_ns": 7_000_000_000_u64, "root": at.join("root"),
        "root_sum": sum(1), "kernel_sum": sum(1), "memory_sum": sum(1),
        "state_sum": sum(1), "layer_sum": sum(4096),
    });
    if let Some(base) = base {
        json["base"] = serde_json::json!({
            "dir": base, "manifest_sha256": "0".repeat(64), "extents_sum": sum(1),
        });
    }
    fs::write(at.join(MANIFEST_NAME), json.to_string()).unwrap();
}

/// The origin of a snapshot of this sandbox.
pub fn saved(source: SandboxId, vmm: VmmId) -> Origin {
    let saved = Saved {
        source,
        vmm,
        boot: None,
        defaults: TemplateDefaults::default(),
    };
    Origin::Saved(TemplateKind::Snapshot, saved)
}

/// The VMM of the tests, which made every template.
fn vmms(state: &Path) -> Vmms {
    let program = state.with_extension("vmm");
    fs::write(&program, "a VMM").unwrap();
    Vmms::open(state.with_extension("vmms"), &program).unwrap()
}

/// A library with these directories.
pub fn opened(state: &Path, installed: &Path) -> Library {
    fs::create_dir_all(state).unwrap();
    let images = Images::open(&state.with_extension("images")).unwrap();
    let store = Store::new(images, [state, installed]).unwrap();
    Library::open(state.to_owned(), Some(installed), store, vmms(state)).unwrap()
}

/// Adds a template and writes its records, as the pool does.
pub fn keep(
    library: &mut Library,
    id: &str,
    names: Vec<String>,
    origin: Origin,
    created_unix_s: u64,
) {
    let new = library.keep(id, names, origin, created_unix_s).unwrap();
    new.records
        .iter()
        .try_for_each(TemplateRecord::write)
        .unwrap();
}

/// Memory of slightly more than two chunks, with a hole, unique pages, and pages that the base has elsewhere.
pub fn memory(seed: u8, shift: usize) -> Vec<u8> {
    let mut bytes = vec![0; 2 * CHUNK + 3 * memory_diff::PAGE];
    let last = bytes.len() / memory_diff::PAGE - 1;
    for page in (0..700).chain([last - shift]) {
        let at = (page + shift) * memory_diff::PAGE;
        bytes[at..at + 8].copy_from_slice(&(page as u64 + 1).to_le_bytes());
    }
    bytes[CHUNK + 9] = seed;
    bytes
}

/// Writes this memory into a template, and its checksum into the manifest.
pub fn with_memory(dir: &Path, memory: &[u8]) {
    let mut hash = Sha256::new();
    for (number, block) in memory.chunks(BLOCK).enumerate() {
        if !is_zero(block) {
            hash.update((number as u64).to_le_bytes());
            hash.update(block);
        }
    }
    let path = dir.join(MANIFEST_NAME);
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json["memory_sum"]["sha256"] = model::hex(&hash.finalize()).into();
    fs::write(&path, json.to_string()).unwrap();
    let file = File::create(dir.join(MEMORY)).unwrap();
    file.set_len(memory.len() as u64).unwrap();
    write_blocks(&file, 0, memory).unwrap();
}

/// A plan to store the memory of the template in `dir`.
pub fn plan(dir: &Path, base: Option<&Path>) -> DiffPlan {
    DiffPlan {
        id: "one".to_owned(),
        dir: dir.to_owned(),
        base: base.map(Path::to_owned),
        stop: Arc::default(),
    }
}

/// A restorer that may use the whole disk.
pub fn restorer(images: &Path) -> Restorer {
    Restorer {
        images: images.to_owned(),
        account: Account::default(),
        allowance: Allowance::Beyond(0),
    }
}

/// Removes the memory file of a template that is stored as a diff.
pub fn remove_memory(dir: &Path) {
    assert!(set_memory_aside(dir).unwrap());
    remove_aside(dir).unwrap();
    assert!(!set_memory_aside(dir).unwrap());
}
