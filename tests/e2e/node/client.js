// A client in another language, from the same protos: node client.js PROTOS ADDRESS TOKEN
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [protos, address, token] = process.argv.slice(2);
const files = ["operations", "outbox", "replay", "subscription", "projection"];
const definition = loader.loadSync(
  files.map((name) => `noetlpb/v1/${name}.proto`),
  { includeDirs: [protos], longs: String, enums: String, keepCase: true, oneofs: true },
);
const { noetlpb } = grpc.loadPackageDefinition(definition);

function connect(service, bearer = token) {
  const metadata = new grpc.Metadata();
  metadata.set("authorization", `Bearer ${bearer}`);
  const client = new noetlpb.v1[service](address, grpc.credentials.createInsecure());
  return (method, request) =>
    new Promise((resolve, reject) =>
      client[method](request, metadata, { deadline: Date.now() + 10_000 }, (error, answer) =>
        error ? reject(error) : resolve(answer),
      ),
    );
}

async function main() {
  const operations = connect("OperationsService");
  const outbox = connect("OutboxService");
  const info = await operations("GetServerInfo", {});
  const id = "9007199254740993"; // one more than JavaScript's numbers can hold
  const enqueued = await outbox("EnqueueOutbox", {
    messages: [{ event_id: id, execution_id: id, payload_json: '{"from":"node"}', headers: { a: "b" } }],
  });
  const claim = await outbox("ClaimOutboxBatch", { limit: 10, lease: { seconds: 30 } });
  const marked = await outbox("MarkOutboxPublished", {
    outbox_ids: claim.rows.map((row) => row.outbox_id),
    claim_token: claim.claim_token,
  });
  const refused = await connect("OutboxService", "wrong")("GetOutboxStats", {}).catch((error) => error);
  const invalid = await outbox("ClaimOutboxBatch", { limit: -1 }).catch((error) => error);
  console.log(
    JSON.stringify({ info, enqueued, claim, marked, refused: refused.code, invalid: invalid.details }),
  );
}

main().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
