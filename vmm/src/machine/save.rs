//! Saves a VM as a full snapshot, a diff against the template that it descends from, or the layer alone.

use std::{fs::File, io, os::unix::fs::FileExt, path::PathBuf};

use model::{FileSum, Platform, TEMPLATE_FORMAT, TemplateBase, TemplateManifest, clock};
use vmm_control::{
    Reply, SnapshotContent, VmPhase,
    files::{FileRole, Files, TemplateFile},
};

use super::event_loop::Machine;
use super::vm::{KernelOrigin, Vm};
use crate::{
    error::MachineError,
    extents::{self, Extents},
    memory,
    snapshot::{self, Directory, MachineState, SnapshotError, SummedFile},
};

/// Checksums of a snapshot's large files after they were written, and the base if the snapshot is a diff.
struct Written {
    base: Option<TemplateBase>,
    memory: FileSum,
    layer: FileSum,
}

/// The empty files that the client sent.
fn targets(files: &mut Files) -> Directory {
    Directory::take(&PathBuf::new(), FileRole::Template, files)
}

fn write(to: &Directory, name: TemplateFile, bytes: &[u8]) -> Result<(), SnapshotError> {
    let written = to.file(name)?.write_all_at(bytes, 0);
    written.map_err(snapshot::at("write", &to.path(name)))
}

impl Machine {
    pub(super) fn snapshot(
        &mut self,
        content: SnapshotContent,
        files: &mut Files,
    ) -> Result<Reply, MachineError> {
        self.set_phase(VmPhase::Paused)?;
        let vm = self.need_vm()?;
        let platform = vm.platform.platform();
        let draft = targets(files);
        let taken_at_unix_ns = clock::unix_ns();
        let state = MachineState {
            platform: vm.platform.save()?,
            bus: vm.bus.state(),
        };
        let bytes = snapshot::encode(&state, platform)?;
        write(&draft, TemplateFile::State, &bytes)?;
        let written = match content {
            SnapshotContent::Diff if vm.ancestor_stands() => vm.write_diff(&draft)?,
            SnapshotContent::Full | SnapshotContent::Diff => vm.write_whole(&draft)?,
        };
        let origin = &vm.origin;
        let manifest = TemplateManifest {
            format: TEMPLATE_FORMAT,
            platform,
            memory: model::Bytes(origin.ram),
            vcpus: origin.vcpus,
            hypercalls: (platform == Platform::Ring3).then_some(origin.hypercalls),
            taken_at_unix_ns,
            root: origin.root.clone(),
            root_sum: match &origin.root_sum {
                Some(sum) => sum.clone(),
                None => snapshot::sum(vm.bus.root(), &origin.root)?,
            },
            kernel_sum: match &origin.kernel {
                KernelOrigin::File(path, file) => snapshot::sum(file, path)?,
                KernelOrigin::Sum(sum) => sum.clone(),
            },
            base: written.base,
            memory_sum: written.memory,
            state_sum: snapshot::sum_of(&bytes),
            layer_sum: written.layer,
        };
        let json = serde_json::to_vec_pretty(&manifest);
        let json = json.map_err(|source| SnapshotError::Manifest {
            path: draft.path(TemplateFile::Manifest),
            source,
        })?;
        write(&draft, TemplateFile::Manifest, &json)?;
        Ok(Reply::Done)
    }

    pub(super) fn save_layer(&mut self, files: &mut Files) -> Result<Reply, MachineError> {
        self.set_phase(VmPhase::Paused)?;
        let vm = self.need_vm()?;
        let to = targets(files);
        vm.bus
            .copy_layer_to(to.file(TemplateFile::Layer)?)
            .map_err(snapshot::at("write", &to.path(TemplateFile::Layer)))?;
        Ok(Reply::Done)
    }

    pub(super) fn record_working_set(&mut self, files: &mut Files) -> Result<Reply, MachineError> {
        let memory = self.need_vm()?.platform.memory();
        let to = targets(files);
        let file = to.file(TemplateFile::WorkingSet)?;
        let set = memory.working_set();
        set.and_then(|set| memory::write_working_set(file, &set))
            .map_err(snapshot::at("write", &to.path(TemplateFile::WorkingSet)))?;
        Ok(Reply::Done)
    }
}

impl Vm {
    fn ancestor_stands(&self) -> bool {
        let ancestor = self.origin.ancestor.as_ref();
        ancestor.is_some_and(|ancestor| ancestor.template.stands())
    }

    fn write_whole(&self, draft: &Directory) -> Result<Written, MachineError> {
        let fixups = self.platform.memory_fixups()?;
        let path = draft.path(TemplateFile::Memory);
        let file = draft.file(TemplateFile::Memory)?;
        self.platform
            .memory()
            .save(file)
            .and_then(|()| {
                let mut words = fixups.into_iter();
                words.try_for_each(|(at, word)| file.write_all_at(&word.to_le_bytes(), at))
            })
            .map_err(snapshot::at("write", &path))?;
        let memory = snapshot::sparse_sum(file, &path)?;
        let path = draft.path(TemplateFile::Layer);
        let file = draft.file(TemplateFile::Layer)?;
        self.bus
            .copy_layer_to(file)
            .map_err(snapshot::at("write", &path))?;
        Ok(Written {
            base: None,
            memory,
            layer: snapshot::sparse_sum(file, &path)?,
        })
    }

    fn write_diff(&self, draft: &Directory) -> Result<Written, MachineError> {
        let ancestor = self.origin.ancestor.as_ref();
        let ancestor = ancestor.ok_or(MachineError::WrongPhase("the VM is not a clone"))?;
        let fixups = self.platform.memory_fixups()?;
        let (in_memory, memory) = write_summed(draft, TemplateFile::Memory, |file| {
            let memory = self.platform.memory();
            memory.save_diff(&ancestor.memory, &fixups, file)
        })?;
        let (in_layer, layer) = write_summed(draft, TemplateFile::Layer, |file| {
            self.bus.save_layer_diff(file)
        })?;
        let lists = extents::encode(TEMPLATE_FORMAT, &in_memory, &in_layer)
            .map_err(SnapshotError::Scattered)?;
        write(draft, TemplateFile::Extents, &lists)?;
        let base = TemplateBase {
            dir: ancestor.template.home.clone(),
            manifest_sha256: ancestor.template.manifest_sha256.clone(),
            extents_sum: snapshot::sum_of(&lists),
        };
        Ok(Written {
            base: Some(base),
            memory,
            layer,
        })
    }
}

/// Writes a file of the snapshot and hashes it in the same pass.
fn write_summed(
    draft: &Directory,
    name: TemplateFile,
    write: impl FnOnce(&mut SummedFile) -> io::Result<Extents>,
) -> Result<(Extents, FileSum), SnapshotError> {
    let path = draft.path(name);
    let file: io::Result<File> = draft.file(name)?.try_clone();
    let mut file = SummedFile::new(file.map_err(snapshot::at("write", &path))?);
    write(&mut file)
        .and_then(|extents| Ok((extents, file.finish()?)))
        .map_err(snapshot::at("write", &path))
}
