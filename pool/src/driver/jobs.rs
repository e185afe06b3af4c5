//! Starts the jobs, on threads and tasks. Each job reports its end to the driver.

use std::{fmt, io, os::fd::OwnedFd, path::PathBuf, sync::Arc};

use library::{
    TakenNames,
    account::{Account, Allowance},
    copy::CopyPlan,
    diff::Restorer,
    disk::DiskPlan,
    durable::Durability,
    error::is_full,
    info::TemplateInfo,
    record::TemplateRecord,
    template::Origin,
};
use model::SandboxId;
use tokio::{sync::mpsc, task::spawn_blocking};
use vmm_control::template::LoadedTemplate;

use crate::{
    answer::Answer,
    cgroup::Groups,
    config::PoolConfig,
    leftovers::Leftovers,
    message::{CopySize, FilesAdded, LoadFailed, Published, Renamed, Report, SnapshotFor},
    network,
    record::{Record, SlotDir},
    state_dir::IMAGES,
    vm::Vm,
    work::{
        self,
        adopt::{AdoptPausedPlan, AdoptPlan},
        lease::{LeasePlan, Lines, serve},
        save::{PausePlan, SnapshotPlan},
        start::StartPlan,
    },
};

#[derive(Debug)]
pub(super) struct Jobs {
    config: Arc<PoolConfig>,
    pub(super) groups: Arc<Groups>,
    pub(super) reporter: mpsc::UnboundedSender<Report>,
    templates: mpsc::UnboundedSender<Work>,
    account: Account,
}

impl Jobs {
    pub(super) fn new(
        config: Arc<PoolConfig>,
        groups: Arc<Groups>,
        reporter: mpsc::UnboundedSender<Report>,
        account: Account,
    ) -> Self {
        let (templates, queue) = mpsc::unbounded_channel();
        tokio::spawn(in_turn(queue));
        Self {
            config,
            groups,
            reporter,
            templates,
            account,
        }
    }

    /// Runs blocking work on a thread. The report is lost only if the driver has ended.
    pub(super) fn run(&self, work: impl FnOnce() -> Report + Send + 'static) {
        let reporter = self.reporter.clone();
        spawn_blocking(move || {
            let _ = reporter.send(work());
        });
    }

    pub(super) fn adopt(&self, plan: AdoptPlan) {
        let reporter = self.reporter.clone();
        self.run(move || {
            let id = plan.id.clone();
            let prepared = plan.prepare();
            let adopted = prepared.and_then(|asking| {
                let _ = reporter.send(Report::Asking(id.clone()));
                asking.run()
            });
            Report::Adopted(id, adopted)
        });
    }

    pub(super) fn adopt_paused(&self, plan: AdoptPausedPlan) {
        self.run(move || {
            let id = plan.id.clone();
            plan.run();
            Report::Adopted(id, Ok(None))
        });
    }

    /// Removes the leftovers of a previous server.
    pub(super) fn sweep(&self, leftovers: Leftovers) {
        let (groups, patience) = (Arc::clone(&self.groups), self.config.start_timeout);
        let reporter = self.reporter.clone();
        self.run(move || {
            leftovers.sweep(&groups, patience);
            let _ = reporter.send(Report::ServersLeft(groups.remove_former_servers()));
            Report::Swept
        });
    }

    /// Removes the cgroups of servers that have ended since.
    pub(super) fn remove_former_servers(&self) {
        let groups = Arc::clone(&self.groups);
        self.run(move || Report::ServersLeft(groups.remove_former_servers()));
    }

    /// Makes a VM for a fill, a cold start or a resume.
    pub(super) fn start(&self, id: SandboxId, plan: StartPlan) {
        self.run(move || Report::Made(id, plan.run().map(Box::new)));
    }

    /// Leases a warm slot. Runs on a task rather than a thread, because a caller waits for it.
    pub(super) fn lease(&self, plan: LeasePlan, lines: Lines) {
        let reporter = self.reporter.clone();
        tokio::spawn(async move {
            let id = plan.id.clone();
            let served = serve(plan, lines).await.map(Box::new);
            let _ = reporter.send(Report::Leased(id, served));
        });
    }

    pub(super) fn pause(&self, id: SandboxId, plan: PausePlan) {
        self.run(move || Report::Paused(id, Box::new(plan.run())));
    }

    pub(super) fn snapshot(&self, id: SandboxId, plan: SnapshotPlan, purpose: SnapshotFor) {
        self.run(move || Report::Snapshotted(id, purpose, plan.run()));
    }

    /// Writes the record of a running sandbox and reports it. Then removes the pause from which the sandbox was
    /// resumed, if it still exists, and reports the end of the job.
    pub(super) fn write(&self, id: SandboxId, dir: SlotDir, record: Record) {
        let reporter = self.reporter.clone();
        self.run(move || {
            let written = dir.write(&record, Durability::Process);
            let _ = reporter.send(Report::Written(id.clone(), written));
            Report::WriteEnded(id, dir.forget_pause())
        });
    }

    /// Makes memory files of templates that are stored as diffs.
    pub(super) fn restorer(&self) -> Restorer {
        Restorer {
            images: self.config.state.join(IMAGES),
            account: self.account.clone(),
            allowance: Allowance::Beyond(self.config.disk_reserve.0),
        }
    }

    /// Copies a template's memory into huge pages. They are charged to the server's cgroup, so its limit, if any, grows
    /// by `copies`, the length of all copies that are being made or in use.
    ///
    /// # Errors
    /// Returns an error, without loading, if the limit cannot be set. [`Report::Loaded`] reports a failed load.
    pub(super) fn load(
        &self,
        template: String,
        dir: PathBuf,
        size: CopySize,
        copies: u64,
    ) -> io::Result<()> {
        if let Some(memory) = self.config.server_memory {
            self.groups.limit_server(memory.0.saturating_add(copies))?;
        }
        let restorer = self.restorer();
        self.run(move || {
            let restored = restorer.restore(&dir).map_err(|e| {
                let failed = if is_full(&e) {
                    LoadFailed::NoSpace
                } else {
                    LoadFailed::Other
                };
                failed(e.to_string())
            });
            let loaded = restored.and_then(|()| {
                let loaded = LoadedTemplate::load(&dir).map(Arc::new);
                loaded.map_err(|e| LoadFailed::Other(model::chain(&e)))
            });
            Report::Loaded(template, dir, size, loaded)
        });
        Ok(())
    }

    /// Kills a VM process. If `disown` is given, first removes the record in that directory, so that the next server
    /// does not adopt a sandbox that was about to end.
    pub(super) fn kill(&self, id: SandboxId, pidfd: Arc<OwnedFd>, disown: Option<SlotDir>) {
        spawn_blocking(move || {
            if let Some(Err(error)) = disown.map(|dir| dir.disown()) {
                tracing::error!(sandbox = %id, %error, "cannot remove the sandbox's record");
            }
            crate::vm::kill(&pidfd);
        });
    }

    /// Releases the TAP of a VM that has exited.
    pub(super) fn release(&self, record: &mut Record) {
        self.run(self.release_tap(record));
    }

    fn release_tap(&self, record: &mut Record) -> impl FnOnce() -> Report + Send + use<> {
        let (tap, vmm) = (record.tap.take(), record.vmm);
        let network = self.config.network.clone();
        move || Report::Released(network::release(network.as_ref(), tap, vmm))
    }

    /// Releases a slot's TAP, and removes its directory and its cgroup.
    pub(super) fn clean(
        &self,
        id: SandboxId,
        dir: SlotDir,
        durability: Durability,
        record: &mut Record,
    ) {
        let groups = Arc::clone(&self.groups);
        let released = self.release_tap(record);
        let reporter = self.reporter.clone();
        self.run(move || {
            let _ = reporter.send(released());
            let cleaned = work::save::clean(&dir, &groups, id.as_str(), durability);
            let errors = [
                cleaned.disowned.as_ref().err(),
                cleaned.removed.as_ref().err(),
            ];
            for error in errors.into_iter().flatten() {
                tracing::error!(
                    sandbox = %id,
                    %error,
                    "cannot remove all files of the sandbox; the next server tries again"
                );
            }
            Report::Cleaned(id, cleaned.disowned)
        });
    }

    /// Watches a VM process and reports its exit.
    pub(super) fn watch(&self, id: SandboxId, vm: Vm) {
        let reporter = self.reporter.clone();
        tokio::spawn(async move {
            if let Err(error) = vm.exited().await {
                tracing::error!(sandbox = %id, %error, "cannot watch the sandbox's VMM");
            }
            let _ = reporter.send(Report::VmExited(id));
        });
    }

    /// Writes the records of a new template and of the templates that lose names to it, then reports.
    pub(super) fn publish(
        &self,
        records: Vec<TemplateRecord>,
        template: TemplateInfo,
        taken: TakenNames,
        answer: Answer<TemplateInfo>,
    ) {
        let reporter = self.reporter.clone();
        self.change_templates(move || {
            let written = records.iter().try_for_each(TemplateRecord::write);
            if written.is_err()
                && let Some(new) = records.first()
                && let Err(error) = new.remove()
            {
                tracing::error!(
                    template = template.id,
                    %error,
                    "cannot remove the directory of a template that was not added"
                );
            }
            let _ = reporter.send(Report::Published(Published {
                template,
                taken,
                written,
                answer,
            }));
        });
    }

    /// Writes the records of templates whose names have changed, then reports. Stops at the first error. The next
    /// server may then find a name with two templates, or still with its previous template.
    pub(super) fn rename(
        &self,
        records: Vec<TemplateRecord>,
        former: TakenNames,
        answer: Answer<()>,
    ) {
        let reporter = self.reporter.clone();
        self.change_templates(move || {
            let written = records.iter().try_for_each(TemplateRecord::write);
            let _ = reporter.send(Report::Renamed(Renamed {
                former,
                written,
                answer,
            }));
        });
    }

    /// Links or copies the files of a disk template.
    pub(super) fn add_disk(&self, plan: DiskPlan, answer: Answer<TemplateInfo>) {
        self.run(move || {
            let boot = plan.run();
            Report::FilesAdded(FilesAdded {
                added: boot.map(|boot| Origin::Disk(plan.size, boot, None)),
                id: plan.id,
                answer,
            })
        });
    }

    /// Links the files of a built template.
    pub(super) fn copy_template(&self, plan: CopyPlan, answer: Answer<TemplateInfo>) {
        self.run(move || {
            let linked = plan.run();
            Report::FilesAdded(FilesAdded {
                added: linked.map(|()| plan.origin),
                id: plan.id,
                answer,
            })
        });
    }

    /// Queues work that changes the records of templates. The work runs in the order of the queue.
    pub(super) fn change_templates(&self, work: impl FnOnce() + Send + 'static) {
        let _ = self.templates.send(Work(Box::new(work)));
    }
}

struct Work(Box<dyn FnOnce() + Send>);

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Work")
    }
}

/// Runs queued work on a thread, one item at a time. Ends when the channel is closed and the queue is empty.
async fn in_turn(mut queue: mpsc::UnboundedReceiver<Work>) {
    while let Some(Work(work)) = queue.recv().await {
        // If the work panics, the panic is printed, and the next item begins.
        let _ = spawn_blocking(work).await;
    }
}
