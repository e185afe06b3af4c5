//! Time limits of builds.

use std::time::Duration;

use builds::{
    cancel::cancellation,
    log::BuildLog,
    plan::{At, From, Step, StepKind},
    run::{COMMAND_LIMIT, Executor, ExecutorSpec, Order},
    uploads::Uploads,
};
use model::Bytes;
use netisolation::DefaultEgress;

use crate::world::{World, images, messages, registries, run, state};

fn order(command: &str) -> Order {
    Order {
        template_id: "a".repeat(20),
        from: From::Template("base".to_owned()),
        registry: None,
        steps: vec![Step {
            kind: StepKind::Run,
            args: vec![command.to_owned()],
            files: None,
            force: false,
        }],
        start: None,
        ready: None,
        image_config: None,
        force: false,
        vcpus: 1,
        memory: Bytes::mib(256),
        min_free_disk: Bytes(0),
    }
}

pub(crate) fn kvm_a_run_without_end_ends_its_build_at_the_limit() {
    run(async {
        let state = state();
        let world = World::open(state.path(), images(registries(&[]))).await;
        let executor = async |name: &str, run_limit| {
            let spec = ExecutorSpec {
                dir: state.path().join(name),
                quota: Bytes::mib(1024),
                egress: DefaultEgress::Deny,
                run_limit,
            };
            std::fs::create_dir(&spec.dir).unwrap();
            Executor::open(world.pool.clone(), world.bases.clone(), spec).await
        };
        let hasty = executor("hasty", Duration::from_secs(5)).await;
        let patient = executor("patient", COMMAND_LIMIT).await;
        let uploads = Uploads::open(state.path().join("files"), 0, 0).unwrap();
        let log = [BuildLog::default(), BuildLog::default()];
        let (_canceller, cancel) = cancellation();
        let endless = order("echo begun; sleep infinity");
        let other = order("echo done > it");
        let (failed, built) = tokio::join!(
            hasty.run(&endless, &uploads, &log[0], cancel.clone()),
            patient.run(&other, &uploads, &log[1], cancel.clone()),
        );
        let failure = failed.unwrap_err();
        assert_eq!(
            failure.message,
            "failed to run command 'echo begun; sleep infinity': the command did not end within 5 s"
        );
        assert_eq!(failure.at, At::Step(1));
        let lines = messages(&log[0]);
        assert!(
            lines.iter().any(|line| line.ends_with(": begun")),
            "{lines:?}"
        );
        let template = built.unwrap().template;
        assert!(world.pool.list().await.unwrap().is_empty());
        assert_eq!(world.sh(&template, "cat /home/user/it").await, "done");
        // A command that ends in time is not affected.
        let (short, log) = (order("true"), BuildLog::default());
        hasty.run(&short, &uploads, &log, cancel).await.unwrap();
        world.close().await;
    });
}
