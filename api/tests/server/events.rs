//! Life-cycle events of sandboxes, listed and posted to a webhook, across a crash of the server.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    time::Instant,
};

use serde_json::{Value, json};

use crate::{
    http,
    process::{JSON, PATIENCE, Server},
};

/// A request to the webhook that has not been responded to yet.
struct Posted {
    delivery: String,
    event: Value,
    stream: std::net::TcpStream,
}

impl Posted {
    fn accept(listener: &TcpListener) -> Self {
        listener.set_nonblocking(true).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(_) if Instant::now() < deadline => {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                Err(why) => panic!("no delivery: {why}"),
            }
        };
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let (mut delivery, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if let Some(id) = line.strip_prefix("e2b-delivery-id: ") {
                id.trim().clone_into(&mut delivery);
            }
            if let Some(text) = line.strip_prefix("Content-Length: ") {
                length = text.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let event = serde_json::from_slice(&body).unwrap();
        Self {
            delivery,
            event,
            stream,
        }
    }

    fn take(mut self) -> String {
        let answer = b"HTTP/1.1 204 No Content\r\n\r\n";
        self.stream.write_all(answer).unwrap();
        self.event["type"].as_str().unwrap().to_owned()
    }
}

fn types(listed: &Value) -> Vec<&str> {
    let events = listed.as_array().unwrap().iter();
    events
        .map(|e| {
            e["type"]
                .as_str()
                .unwrap()
                .strip_prefix("sandbox.lifecycle.")
                .unwrap()
        })
        .collect()
}

pub(crate) fn kvm_events_are_listed_and_delivered_over_a_crash_of_the_server() {
    let mut server = Server::with(&[
        "--insecure-loopback",
        "--warm",
        "0:0",
        "--webhook-exception",
        "127.0.0.0/8",
    ]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/hook?a=b", listener.local_addr().unwrap());
    let wanted = ["created", "paused", "killed"].map(|kind| format!("sandbox.lifecycle.{kind}"));
    let hook = json!({"name": "n", "url": url, "events": wanted, "signatureSecret": "s"});
    let hook = server.post("/events/webhooks", &hook).expect(201).json();
    let hook = format!("/events/webhooks/{}", hook["id"].as_str().unwrap());
    server
        .post(
            "/events/webhooks",
            &json!({"name": "n", "url": "file:///etc", "events": wanted,
        "signatureSecret": "s"}),
        )
        .expect(400);

    let sandbox = server.create(&json!({"metadata": {"user": "ann"}}));
    // The server is killed while the webhook has the event and has not responded.
    let first = Posted::accept(&listener);
    assert_eq!(first.event["sandboxId"], sandbox.id);
    assert_eq!(first.event["eventData"]["sandbox_metadata"]["user"], "ann");
    server.crash_and_restart();
    let again = Posted::accept(&listener);
    assert_eq!(
        (&again.delivery, &again.event),
        (&first.delivery, &first.event)
    );
    assert_eq!(again.take(), "sandbox.lifecycle.created");

    server
        .post(&sandbox.path("/timeout"), &json!({"timeout": 600}))
        .expect(204);
    server.post(&sandbox.path("/pause"), &json!({})).expect(204);
    let paused = Posted::accept(&listener);
    let execution = &paused.event["eventData"]["execution"];
    assert!(
        execution["execution_time"].as_u64().unwrap() > 0 && execution["memory_mb"] == 512,
        "{execution}"
    );
    assert_eq!(paused.take(), "sandbox.lifecycle.paused");
    server
        .post(&sandbox.path("/connect"), &json!({"timeout": 600}))
        .expect(201);
    server
        .post(&sandbox.path("/snapshots"), &json!({}))
        .expect(201);
    server.delete(&sandbox.path("")).expect(204);
    assert_eq!(Posted::accept(&listener).take(), "sandbox.lifecycle.killed");

    let of_sandbox = format!("/events/sandboxes/{}", sandbox.id);
    let all = server
        .get(&format!("{of_sandbox}?orderAsc=true"))
        .expect(200)
        .json();
    assert_eq!(
        types(&all),
        [
            "created",
            "updated",
            "paused",
            "resumed",
            "checkpointed",
            "killed"
        ]
    );
    let executions: Vec<_> = all
        .as_array()
        .unwrap()
        .iter()
        .map(|e| &e["sandboxExecutionId"])
        .collect();
    assert_eq!(executions[0], executions[2]);
    assert_ne!(executions[2], executions[3]);
    let killed = server.get("/events/sandboxes?limit=1").expect(200).json();
    assert_eq!(types(&killed), ["killed"]);
    let some = format!("{of_sandbox}?types=sandbox.lifecycle.paused");
    assert_eq!(types(&server.get(&some).expect(200).json()), ["paused"]);
    server.get("/events/sandboxes?types=other").expect(400);

    let off = json!({"enabled": false});
    let patched = http::send(
        server.address,
        "PATCH",
        &hook,
        &JSON,
        off.to_string().as_bytes(),
    );
    let shown = patched.expect(200).json();
    assert_eq!(shown["enabled"], false);
    assert!(shown.get("signatureSecret").is_none());
    // A sandbox whose end no server has seen.
    let lost = server.create(&json!({}));
    let vmm = server.vmm_of(&lost);
    server.kill();
    let pid = nix::unistd::Pid::from_raw(vmm.try_into().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    server.restart();
    let of_lost = format!("/events/sandboxes/{}", lost.id);
    crate::process::until("the end is an event", || {
        types(&server.get(&of_lost).expect(200).json()) == ["killed", "created"]
    });
    server.delete(&hook).expect(200);
    server.get(&hook).expect(404);
}
