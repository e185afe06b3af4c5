//! Writing a VM down: whole, as what differs from the template that it descends from, or its layer alone.

use std::{io, os::unix::fs::FileExt, path::Path};

use model::{FileSum, Platform, TEMPLATE_FORMAT, TemplateBase, TemplateManifest, template_file};
use vmm_control::{Reply, SnapshotContent, VmPhase};

use super::{KernelOrigin, Machine, Vm};
use crate::{
    clock,
    error::MachineError,
    extents::{self, Extents},
    snapshot::{self, Draft, MachineState, SnapshotError, SummedFile},
};

/// The large files of a template as they were written.
struct Written {
    base: Option<TemplateBase>,
    memory: FileSum,
    layer: FileSum,
}

impl Machine {
    pub(super) fn snapshot(
        &mut self,
        dir: &Path,
        content: SnapshotContent,
    ) -> Result<Reply, MachineError> {
        self.set_phase(VmPhase::Paused)?;
        let vm = self.need_vm()?;
        let platform = vm.platform.platform();
        let draft = Draft::begin(dir)?;
        let taken_at_unix_ns = clock::unix_ns();
        let state = MachineState {
            platform: vm.platform.save()?,
            bus: vm.bus.state(),
        };
        let bytes = snapshot::encode(&state, platform)?;
        draft.write(template_file::STATE, &bytes)?;
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
                None => snapshot::sum(&origin.root)?,
            },
            kernel_sum: match &origin.kernel {
                KernelOrigin::File(path) => snapshot::sum(path)?,
                KernelOrigin::Sum(sum) => sum.clone(),
            },
            base: written.base,
            memory_sum: written.memory,
            state_sum: snapshot::sum(&draft.path(template_file::STATE))?,
            layer_sum: written.layer,
        };
        draft.finish(&manifest)?;
        Ok(Reply::Done)
    }

    pub(super) fn save_layer(&mut self, path: &Path) -> Result<Reply, MachineError> {
        self.set_phase(VmPhase::Paused)?;
        let vm = self.need_vm()?;
        snapshot::write_file(path, |file| vm.bus.copy_layer_to(file).map(|_| ()))?;
        Ok(Reply::Done)
    }
}

impl Vm {
    fn ancestor_stands(&self) -> bool {
        let ancestor = self.origin.ancestor.as_ref();
        ancestor.is_some_and(|ancestor| ancestor.template.stands())
    }

    fn write_whole(&self, draft: &Draft) -> Result<Written, MachineError> {
        let fixups = self.platform.memory_fixups()?;
        let path = draft.path(template_file::MEMORY);
        let file = draft.create(template_file::MEMORY)?;
        self.platform
            .memory()
            .save(&file)
            .and_then(|()| {
                let mut words = fixups.into_iter();
                words.try_for_each(|(at, word)| file.write_all_at(&word.to_le_bytes(), at))
            })
            .map_err(snapshot::at("write", &path))?;
        let memory = snapshot::sparse_sum(&path)?;
        let path = draft.path(template_file::LAYER);
        self.bus
            .copy_layer_to(&draft.create(template_file::LAYER)?)
            .map_err(snapshot::at("write", &path))?;
        Ok(Written {
            base: None,
            memory,
            layer: snapshot::sparse_sum(&path)?,
        })
    }

    fn write_diff(&self, draft: &Draft) -> Result<Written, MachineError> {
        let ancestor = self.origin.ancestor.as_ref();
        let ancestor = ancestor.ok_or(MachineError::WrongPhase("the VM is no clone"))?;
        let fixups = self.platform.memory_fixups()?;
        let (in_memory, memory) = write_summed(draft, template_file::MEMORY, |file| {
            let memory = self.platform.memory();
            memory.save_diff(&ancestor.memory, &fixups, file)
        })?;
        let (in_layer, layer) = write_summed(draft, template_file::LAYER, |file| {
            self.bus.save_layer_diff(file)
        })?;
        let lists = extents::encode(TEMPLATE_FORMAT, &in_memory, &in_layer)
            .map_err(SnapshotError::Scattered)?;
        draft.write(template_file::EXTENTS, &lists)?;
        let base = TemplateBase {
            dir: ancestor.template.home.clone(),
            manifest_sha256: ancestor.template.manifest_sha256.clone(),
            extents_sum: snapshot::sum(&draft.path(template_file::EXTENTS))?,
        };
        Ok(Written {
            base: Some(base),
            memory,
            layer,
        })
    }
}

/// Writes and sums one of the draft's files in one pass.
fn write_summed(
    draft: &Draft,
    name: &str,
    write: impl FnOnce(&mut SummedFile) -> io::Result<Extents>,
) -> Result<(Extents, FileSum), SnapshotError> {
    let mut file = SummedFile::new(draft.create(name)?);
    let path = draft.path(name);
    write(&mut file)
        .and_then(|extents| Ok((extents, file.finish()?)))
        .map_err(snapshot::at("write", &path))
}
