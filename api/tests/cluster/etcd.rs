//! An etcd client with any host's certificate that follows none of the rules.

use std::path::Path;

use prost::Message;
use testbed::cluster::etcd_url;
use tonic::{
    Request, Status,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Certificate, ClientTlsConfig, Endpoint, Identity},
};
use tonic_prost::ProstCodec;

/// Part of `RangeRequest` of etcd's rpc.proto.
#[derive(Clone, PartialEq, Eq, Message)]
struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    range_end: Vec<u8>,
}

/// `RangeResponse`.
#[derive(Clone, PartialEq, Eq, Message)]
struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(uint64, tag = "3")]
    pub(crate) revision: u64,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) value: Vec<u8>,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct PutResponse {}

/// All keys of the cluster. `files` has `ca.crt` and `node.pem`.
pub(crate) fn list(files: &Path) -> Result<Vec<KeyValue>, Status> {
    let range = RangeRequest {
        key: b"/cube/v1/".to_vec(),
        range_end: b"/cube/v10".to_vec(),
    };
    let found: RangeResponse = call(files, "/etcdserverpb.KV/Range", range)?;
    Ok(found.kvs)
}

pub(crate) fn put(files: &Path, key: &str, value: &[u8]) -> Result<(), Status> {
    let put = PutRequest {
        key: format!("/cube/v1/{key}").into_bytes(),
        value: value.to_vec(),
    };
    call::<_, PutResponse>(files, "/etcdserverpb.KV/Put", put).map(drop)
}

fn call<Q, A>(files: &Path, path: &'static str, message: Q) -> Result<A, Status>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    let read = |name: &str| std::fs::read(files.join(name)).unwrap();
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(read("ca.crt")))
        .identity(Identity::from_pem(read("node.pem"), read("node.pem")));
    let endpoint = Endpoint::from_shared(etcd_url())
        .unwrap()
        .tls_config(tls)
        .unwrap();
    // The namespace belongs to this thread.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let channel = endpoint.connect().await;
        let channel = channel.map_err(|why| Status::unavailable(model::chain(&why)))?;
        let mut client = Grpc::new(channel);
        let ready = client.ready().await;
        ready.map_err(|why| Status::unavailable(model::chain(&why)))?;
        let codec = ProstCodec::<Q, A>::default();
        let path = PathAndQuery::from_static(path);
        let answer = client.unary(Request::new(message), path, codec).await?;
        Ok(answer.into_inner())
    })
}
