//! Templates made from disks and from running sandboxes.

use library::{
    copy::CopyPlan,
    disk::{DiskPlan, Layer, bytes_to_copy},
    info::{DiskSpec, MAX_DISK, TemplateDefaults, TemplateInfo, TemplateKind},
    record::Size,
    template::{IMAGE, Origin, Saved, Storage},
};
use model::{Bytes, SandboxId, template_file};

use super::{Driver, admission::space::Saving};
use crate::{
    answer::Answer,
    error::PoolError,
    host,
    message::{FilesAdded, SandboxRequest, SnapshotFor},
    record::Record,
};

fn failed(why: impl Into<String>) -> PoolError {
    PoolError::Failed {
        what: "add a disk template",
        why: why.into(),
    }
}

impl Driver {
    pub(super) fn add_disk(&mut self, spec: DiskSpec, answer: Answer<TemplateInfo>) {
        self.begin_disk(spec, Bytes(0), answer);
    }

    /// `disk` is the minimum size of the layer.
    fn begin_disk(&mut self, spec: DiskSpec, disk: Bytes, answer: Answer<TemplateInfo>) {
        let plan = self.plan_disk(spec, disk);
        if let Some((plan, answer)) = answer.or_refuse(plan) {
            self.upkeep.job_begins();
            self.jobs.add_disk(plan, answer);
        }
    }

    /// Adds the disk of another template. The disk is complete only if the template's guest has synced it: in an
    /// installed, built or disk template.
    pub(super) fn disk_of(
        &mut self,
        reference: &str,
        size: Option<(Bytes, Bytes)>,
        answer: Answer<TemplateInfo>,
    ) {
        let (memory, disk) = size.unzip();
        if let Some((files, answer)) = answer.or_refuse(self.disk_files(reference)) {
            let spec = DiskSpec {
                memory: memory.unwrap_or(files.memory),
                ..files
            };
            self.begin_disk(spec, disk.unwrap_or_default(), answer);
        }
    }

    pub(super) fn disk_files(&self, reference: &str) -> Result<DiskSpec, PoolError> {
        match self.library.find(reference) {
            None => Err(PoolError::NoTemplate(reference.to_owned())),
            Some(t) if t.base.is_some() || t.info.kind == TemplateKind::Snapshot => {
                Err(PoolError::NoDisk(reference.to_owned()))
            }
            Some(t) => Ok(DiskSpec {
                root: t.root.clone(),
                layer: Some(t.dir.join(template_file::LAYER)),
                memory: t.info.memory,
                vcpus: t.info.vcpus,
            }),
        }
    }

    fn plan_disk(&mut self, spec: DiskSpec, disk: Bytes) -> Result<DiskPlan, PoolError> {
        self.stopping.check()?;
        let size = Size {
            memory: spec.memory,
            vcpus: spec.vcpus,
        };
        size.check().map_err(failed)?;
        if disk > MAX_DISK {
            return Err(failed(format!("a disk of {disk}; use at most {MAX_DISK}")));
        }
        let guest = self.library.guest().ok_or_else(|| {
            failed("no installed template names a kernel to boot from (cargo xtask prepare)")
        })?;
        let layer = match spec.layer {
            Some(layer) => Layer::File(layer),
            None => Layer::Empty,
        };
        let images = self.library.images().clone();
        let copies = bytes_to_copy(&images, &spec.root, &layer, disk).map_err(failed)?;
        let room = self.admission.set_aside(&self.slots, copies);
        let room = room.map_err(|short| self.admission.refuse(short))?;
        let drafted = self.library.draft();
        let (id, home) = drafted.map_err(|e| PoolError::of_disk("add a disk template", &e))?;
        Ok(DiskPlan {
            id,
            home,
            images,
            root: spec.root,
            layer,
            disk,
            guest,
            size,
            _room: room,
        })
    }

    /// Adds a built template with the files of another one.
    pub(super) fn copy_of(&mut self, reference: &str, answer: Answer<TemplateInfo>) {
        let plan = self.plan_copy(reference);
        if let Some((plan, answer)) = answer.or_refuse(plan) {
            self.upkeep.job_begins();
            self.jobs.copy_template(plan, answer);
        }
    }

    fn plan_copy(&mut self, reference: &str) -> Result<CopyPlan, PoolError> {
        self.stopping.check()?;
        let missing = || PoolError::NoTemplate(reference.to_owned());
        let template = self.library.find(reference).ok_or_else(missing)?;
        let origin = template.origin_of_copy().ok_or_else(missing)?;
        // The copy gets the whole memory.
        let memory = match &template.storage {
            Storage::Diff(stored) => stored.header.loaded_bytes,
            Storage::Whole | Storage::New { .. } => 0,
        };
        let bytes = template.info.bytes.0.saturating_add(memory);
        let from = template.dir.clone();
        self.admission
            .check_quota_of(&self.slots, &self.library, bytes)?;
        let drafted = self.library.draft();
        let (id, home) = drafted.map_err(|e| PoolError::of_disk("copy a template", &e))?;
        Ok(CopyPlan {
            id,
            home,
            from,
            origin,
            restorer: self.jobs.restorer(),
        })
    }

    pub(super) fn files_added(&mut self, added: FilesAdded) {
        self.upkeep.job_ended();
        let FilesAdded { id, added, answer } = added;
        let added = added.map_err(PoolError::from);
        let kept = added.and_then(|origin| self.keep_template(&id, Vec::new(), origin));
        self.publish(&id, kept, answer);
    }

    /// Begins to save the disk of a sandbox, or its whole state, as a template. The sandbox keeps running.
    pub(super) fn make_template(&mut self, id: &SandboxId, request: SandboxRequest) {
        let admitted = match &request {
            SandboxRequest::Publish(names, ..) => self
                .library
                .check_names(names)
                .map_err(PoolError::from)
                .and_then(|()| self.set_space_aside(id, Saving::Whole))
                .and_then(|()| self.check_quota(id)),
            _ => self.set_space_aside(id, Saving::Disk),
        };
        let bootable = admitted.and_then(|()| match &self.slots.leased(id)?.record.boot {
            Some(_) => Ok(()),
            None => Err(failed(
                "the sandbox's template does not name a kernel, initramfs and root image to boot from",
            )),
        });
        let drafted = bootable.and_then(|()| {
            let drafted = self.library.draft();
            drafted.map_err(|e| PoolError::of_disk("make a template", &e))
        });
        match drafted {
            Err(e) => request.refuse(e),
            Ok((template, home)) => {
                let purpose = SnapshotFor::Template(template);
                self.begin_snapshot(id, home.join(IMAGE), purpose, request);
            }
        }
    }

    /// Adds the template whose files were saved from a sandbox, and responds to the request.
    pub(super) fn template_saved(
        &mut self,
        id: &SandboxId,
        template: &str,
        request: SandboxRequest,
        result: Result<(), PoolError>,
    ) {
        let record = self.slots.get(id).map(|e| e.record.clone());
        let record = result.and_then(|()| record.ok_or_else(|| PoolError::not_found(id)));
        let (names, origin, answer) = match request {
            SandboxRequest::Snapshot(names, answer) => {
                let saved = record.map(|r| self.saved(id, r, TemplateKind::Snapshot, None));
                (names, saved, answer)
            }
            SandboxRequest::Publish(names, defaults, answer) => {
                let saved = record.map(|r| self.saved(id, r, TemplateKind::Built, Some(defaults)));
                (names, saved, answer)
            }
            SandboxRequest::SaveDisk(answer) => {
                let saved = record.and_then(|record| saved_disk(id, record));
                (Vec::new(), saved, answer)
            }
            // Unreachable: no other request begins a snapshot for a template.
            other => return other.refuse(PoolError::not_found(id)),
        };
        let kept = origin.and_then(|origin| self.keep_template(template, names, origin));
        if let Ok(kept) = &kept {
            let what = format!("template {} was made", kept.info.id);
            self.slots.add_event(id, what);
        }
        self.publish(template, kept, answer);
    }

    fn saved(
        &self,
        id: &SandboxId,
        record: Record,
        kind: TemplateKind,
        defaults: Option<TemplateDefaults>,
    ) -> Origin {
        let saved = Saved {
            source: id.clone(),
            vmm: record
                .vmm_id
                .unwrap_or_else(|| self.library.vmms().current().clone()),
            boot: record.boot,
            defaults: defaults.unwrap_or(record.defaults),
        };
        Origin::Saved(kind, saved)
    }

    fn keep_template(
        &mut self,
        id: &str,
        names: Vec<String>,
        origin: Origin,
    ) -> Result<library::NewTemplate, PoolError> {
        let created = host::unix_ns() / 1_000_000_000;
        self.library
            .keep(id, names, origin, created)
            .map_err(PoolError::from)
    }
}

fn saved_disk(id: &SandboxId, record: Record) -> Result<Origin, PoolError> {
    let size = Size {
        memory: record.template.memory,
        vcpus: record.template.vcpus,
    };
    let boot = record.boot.ok_or_else(|| PoolError::not_found(id))?;
    Ok(Origin::Disk(size, boot, Some(id.clone())))
}
