import { defineConfig } from "vite";

export default defineConfig({
  build: {
    outDir: "../polygon/web/static",
    emptyOutDir: true,
    chunkSizeWarningLimit: 700,
    modulePreload: { polyfill: false },
  },
  server: { proxy: { "/api": "http://127.0.0.1:5000" } },
});
