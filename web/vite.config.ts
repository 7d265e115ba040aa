import { geoMercator, geoPath, type GeoContext } from "d3-geo";
import { feature } from "topojson-client";
import { defineConfig, type Plugin } from "vite";
import atlas from "world-atlas/land-110m.json" with { type: "json" };

// The land of the map is projected here, once, and not by every page that opens: `web/src/land.d.ts`.
const WIDTH = 36_000;
function land(): string {
  // eslint-disable-next-line @typescript-eslint/no-explicit-any
  const world = atlas as any;
  const parts: string[] = [];
  let [x, y] = [0, 0];
  // From the last point, in whole numbers: a third of what the coordinates themselves weigh.
  const to = (letter: string) => (a: number, b: number): void => {
    const [dx, dy] = [Math.round(a) - x, Math.round(b) - y];
    if (letter === "l" && !dx && !dy) return;
    parts.push(`${letter}${dx}${dy < 0 ? "" : " "}${dy}`);
    [x, y] = [x + dx, y + dy];
  };
  let start = [0, 0];
  const move = to("m");
  const context = {
    moveTo: (a: number, b: number) => { move(a, b); start = [x, y]; },
    lineTo: to("l"),
    closePath: () => { parts.push("z"); [x, y] = start; },
  };
  const projection = geoMercator().scale(WIDTH / (2 * Math.PI)).translate([0, 0]).precision(0);
  geoPath(projection, context as unknown as GeoContext)(feature(world, world.objects.land));
  return parts.join("");
}
const landOfTheMap: Plugin = {
  name: "land",
  resolveId: (id) => (id === "virtual:land" ? `\0${id}` : undefined),
  load: (id) => (id === "\0virtual:land" ? `export const WIDTH = ${WIDTH}; export default ${JSON.stringify(land())};` : undefined),
};

export default defineConfig({
  plugins: [landOfTheMap],
  build: {
    outDir: "../polygon/web/static",
    emptyOutDir: true,
    chunkSizeWarningLimit: 700,
    modulePreload: { polyfill: false },
  },
  server: { proxy: { "/api": "http://127.0.0.1:5000" } },
});
