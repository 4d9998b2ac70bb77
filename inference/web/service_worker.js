// Keeps the page's own files, so that a visit needs no connection. local_worker.js keeps the model and its kernels, since
// it may load them before this runs. deployment/publish_space.py --static writes the two lines below.

const VERSION = "";
const FILES = [];

const PATIENCE_MS = 3000;
const HOME = new URL("./", self.location);
const OURS = `page-${HOME.pathname}-`; // other folders of this host may hold such pages too
const CACHE = OURS + VERSION;

self.addEventListener("install", (event) => {
  const requests = FILES.map((name) => new Request(new URL(name, HOME), { cache: "no-cache" }));
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(requests)).then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  event.waitUntil(forgetOthers().then(() => self.clients.claim()));
});

async function forgetOthers() {
  const names = (await caches.keys()).filter((name) => name.startsWith(OURS) && name !== CACHE);
  await Promise.all(names.map((name) => caches.delete(name)));
}

self.addEventListener("fetch", (event) => {
  const { pathname, origin } = new URL(event.request.url);
  if (event.request.method !== "GET" || origin !== HOME.origin || !pathname.startsWith(HOME.pathname)) return;
  const name = pathname.slice(HOME.pathname.length) || "index.html";
  if (FILES.includes(name)) event.respondWith(current(new URL(name, HOME), event.request));
});

// From the server, so that a new page is seen at once; what is kept serves without a connection. A server that does not
// answer soon counts as none.
async function current(url, request) {
  const cache = await caches.open(CACHE);
  const kept = await cache.match(url);
  const patience = new AbortController();
  const timer = setTimeout(() => patience.abort(), PATIENCE_MS);
  try {
    const response = await fetch(request, kept ? { signal: patience.signal } : {});
    clearTimeout(timer); // the body may take longer
    if (response.ok) await cache.put(url, response.clone()).catch(() => {}); // no room
    return response.ok || !kept ? response : kept;
  } catch (error) {
    if (kept) return kept;
    throw error;
  }
}
